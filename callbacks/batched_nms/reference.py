"""The obvious version: torchvision's `batched_nms`, image by image."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torchvision.ops import batched_nms

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

TOLERANCE = {torch.float32: 0}
"""None: the results are indices, and the IoUs that decide about them are rounded as torchvision rounds them."""


def reference(
    boxes: Float[Tensor, "B N 4"],
    scores: Float[Tensor, "B N"],
    labels: Int[Tensor, "B N"],
    is_candidate: Bool[Tensor, "B N"],
    iou_threshold: float = 0.5,
    most: int = 300,
) -> tuple[Int[Tensor, "B D"], Int[Tensor, " B"]]:
    """Return the indices of the candidates kept, best first and 0 behind them, and how many they are."""
    kept = torch.zeros(len(boxes), most, dtype=torch.int64, device=boxes.device)
    count = torch.zeros(len(boxes), dtype=torch.int64, device=boxes.device)
    for image in range(len(boxes)):
        there = torch.where(is_candidate[image])[0]
        found = batched_nms(boxes[image][there], scores[image][there], labels[image][there], iou_threshold)[:most]
        kept[image, : len(found)] = there[found]
        count[image] = len(found)
    return kept, count
