"""Which ground-truth box each anchor answers for, with static shapes: no host sync, no boolean indexing.

The rules are those of torchvision's Matcher with `allow_low_quality_matches=True`, from Ren et al., "Faster R-CNN"
(arXiv 1506.01497, section 3.1.2), with RetinaNet's thresholds (Lin et al., arXiv 1708.02002, section 4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from jaxtyping import Float, Int

BACKGROUND = -1
BETWEEN_THRESHOLDS = -2
PADDING_LABEL = -1

# Pairs of box and anchor looked at in one go. On a GPU this bounds each of about five float32 temporaries to 256 MiB:
# all of the MLPerf batch at once (32 images x 1000 boxes x 120,087 anchors) would take 15 GB apiece. On a CPU they stay
# in the cache, at 1 MiB.
PAIRS_AT_ONCE = 2**26
PAIRS_AT_ONCE_CPU = 2**18


@torch.no_grad()
def match(
    anchors: Float[Tensor, "A 4"],
    boxes: Float[Tensor, "B M 4"],
    labels: Int[Tensor, "B M"],
    foreground_iou: float = 0.5,
    background_iou: float = 0.4,
) -> Int[Tensor, "B A"]:
    """Return for each anchor the index of its box, BACKGROUND, or BETWEEN_THRESHOLDS (takes part in no loss).

    An anchor gets the box of its highest IoU (the first of equals) if that is at least `foreground_iou`, or if the
    anchor is among the best of any box, however low their IoU. That holds for a box that no anchor touches, too: all
    anchors are then its best, at IoU 0, as in torchvision. Boxes labelled PADDING_LABEL match nothing.

    The boxes are taken in chunks of a fixed size, so that memory stays bounded whatever their number.

    Args:
        anchors: xyxy in pixels, float32.
        boxes: xyxy in pixels, float32, padded to a common M. May be M = 0.
        labels: class indices.
        foreground_iou: lowest IoU of a match.
        background_iou: anchors below it are background.
    """
    batch, count = labels.shape
    best_iou = anchors.new_full((batch, len(anchors)), -1.0)
    best_index = labels.new_full((batch, len(anchors)), BACKGROUND)
    rescued = torch.zeros_like(best_iou, dtype=torch.bool)
    pairs = PAIRS_AT_ONCE_CPU if anchors.device.type == "cpu" else PAIRS_AT_ONCE
    chunk = max(1, pairs // max(1, batch * len(anchors)))
    for start in range(0, count, chunk):
        real = labels[:, start : start + chunk, None] != PADDING_LABEL
        iou = pairwise_iou(boxes[:, start : start + chunk], anchors).masked_fill_(~real, -1.0)
        highest_of_box = iou.amax(dim=2, keepdim=True)
        rescued |= ((iou == highest_of_box) & real).any(dim=1)
        highest_of_anchor, index = iou.max(dim=1)
        # Strictly greater: of equal boxes the first one wins, across chunks as within one.
        better = highest_of_anchor > best_iou
        best_index = torch.where(better, index + start, best_index)
        best_iou = torch.maximum(best_iou, highest_of_anchor)
    between = (best_iou >= background_iou) & (best_iou < foreground_iou)
    unmatched = torch.where(between, BETWEEN_THRESHOLDS, BACKGROUND)
    return torch.where((best_iou >= foreground_iou) | rescued, best_index, unmatched)


class AnchorMatcher(nn.Module):
    """`match` with its thresholds. An optimization that knows this role may put another in its place."""

    fasttrain_role = "anchor_matcher"

    def __init__(self, foreground_iou: float, background_iou: float) -> None:
        super().__init__()
        self.foreground_iou, self.background_iou = foreground_iou, background_iou

    def forward(
        self, anchors: Float[Tensor, "A 4"], boxes: Float[Tensor, "B M 4"], labels: Int[Tensor, "B M"]
    ) -> Int[Tensor, "B A"]:
        """Return for each anchor the index of its box, BACKGROUND, or BETWEEN_THRESHOLDS."""
        return match(anchors, boxes, labels, self.foreground_iou, self.background_iou)


def pairwise_iou(boxes: Float[Tensor, "B M 4"], anchors: Float[Tensor, "A 4"]) -> Float[Tensor, "B M A"]:
    """Return the IoU of every box with every anchor, by the arithmetic of torchvision's box_iou, bit for bit."""
    x1, y1, x2, y2 = boxes.unsqueeze(-1).unbind(2)
    anchor_x1, anchor_y1, anchor_x2, anchor_y2 = anchors.t().contiguous()
    width = torch.minimum(x2, anchor_x2).sub_(torch.maximum(x1, anchor_x1)).clamp_(min=0)
    height = torch.minimum(y2, anchor_y2).sub_(torch.maximum(y1, anchor_y1)).clamp_(min=0)
    intersection = width.mul_(height)
    union = (x2 - x1) * (y2 - y1) + (anchor_x2 - anchor_x1) * (anchor_y2 - anchor_y1)
    return intersection.div_(union.sub_(intersection))
