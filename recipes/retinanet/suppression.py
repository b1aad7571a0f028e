"""Which candidates are detections: non-maximum suppression of each class, image by image, as torchvision does it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torchvision.ops import batched_nms

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


class ClassSuppression(nn.Module):
    """Of two candidates of a class that overlap by more than a limit the better one stays; the best ones are kept.

    Waits for the device several times an image.

    Args:
        iou_threshold: the limit.
        most: D, what is kept of an image.
    """

    fasttrain_role = "batched_nms"

    def __init__(self, iou_threshold: float = 0.5, most: int = 300) -> None:
        super().__init__()
        self.iou_threshold, self.most = iou_threshold, most

    def forward(
        self,
        boxes: Float[Tensor, "B N 4"],
        scores: Float[Tensor, "B N"],
        labels: Int[Tensor, "B N"],
        is_candidate: Bool[Tensor, "B N"],
    ) -> tuple[Int[Tensor, "B D"], Int[Tensor, " B"]]:
        """Return the indices of those kept, int64, best first and 0 behind them, and how many they are.

        Of equal scores the one that stands first comes first.

        Args:
            boxes: xyxy, float32, finite.
            scores: float32.
            labels: int64 class indices.
            is_candidate: False for what doesn't take part.
        """
        kept = labels.new_zeros(len(boxes), self.most)
        count = labels.new_zeros(len(boxes))
        for image, takes_part in enumerate(is_candidate):
            there = takes_part.nonzero().squeeze(1)
            found = batched_nms(boxes[image, there], scores[image, there], labels[image, there], self.iou_threshold)
            found = there[found[: self.most]]
            kept[image, : len(found)] = found
            count[image] = len(found)
        return kept, count

    def extra_repr(self) -> str:
        """Return the limits, for `print(model)`."""
        return f"iou_threshold={self.iou_threshold}, most={self.most}"


def picked(values: Tensor, index: Int[Tensor, "B D"], count: Int[Tensor, " B"], padding: float) -> Tensor:
    """Return what stands at the indices, (B, D) or (B, D, channels), and padding from the count on."""
    is_there = torch.arange(index.shape[1], device=index.device) < count[:, None]
    if values.dim() == 3:
        index, is_there = index.unsqueeze(2).expand(-1, -1, values.shape[2]), is_there.unsqueeze(2)
    return values.gather(1, index).masked_fill(~is_there, padding)
