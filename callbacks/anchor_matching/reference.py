"""The obvious version: torchvision's IoU and Matcher, image by image, on the boxes that are no padding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torchvision.models.detection._utils import Matcher
from torchvision.ops import box_iou

if TYPE_CHECKING:
    from jaxtyping import Float, Int

PADDING_LABEL = -1
TOLERANCE = {torch.float32: 0}
"""None: the results are indices, and the IoUs that decide about them are the same floats, bit for bit."""


def reference(
    anchors: Float[Tensor, "A 4"],
    boxes: Float[Tensor, "B M 4"],
    labels: Int[Tensor, "B M"],
    foreground_iou: float = 0.5,
    background_iou: float = 0.4,
) -> Int[Tensor, "B A"]:
    """Return for each anchor the index of its box in the row, -1 for background, -2 between the thresholds.

    An anchor that has an IoU of NaN (0 / 0, of a box and an anchor that both have no area) is background. There
    torchvision's Matcher would give it the first such box.
    """
    matcher = Matcher(foreground_iou, background_iou, allow_low_quality_matches=True)
    matched = torch.full((len(boxes), len(anchors)), Matcher.BELOW_LOW_THRESHOLD, device=labels.device)
    for of_image, row, row_labels in zip(matched, boxes, labels, strict=True):
        real = (row_labels != PADDING_LABEL).nonzero().squeeze(1)
        if len(real):
            iou = box_iou(row[real], anchors)
            found = matcher(iou)
            in_row = torch.where(found >= 0, real[found.clamp(min=0)], found)
            of_image.copy_(in_row.masked_fill(iou.isnan().any(dim=0), Matcher.BELOW_LOW_THRESHOLD))
    return matched
