"""The body: anchors matched with boxes by the kernels, as a function and as a module. For any loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fasttrain.environment import triton_runs
from fasttrain.errors import OptimizationError

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@torch.no_grad()
def match_anchors(
    anchors: Float[Tensor, "A 4"],
    boxes: Float[Tensor, "B M 4"],
    labels: Int[Tensor, "B M"],
    foreground_iou: float = 0.5,
    background_iou: float = 0.4,
) -> Int[Tensor, "B A"]:
    """Return for each anchor the index of its box in the row, int64; -1 for background, -2 between the thresholds.

    By the rules of torchvision's Matcher with `allow_low_quality_matches=True` (Ren et al., "Faster R-CNN", arXiv
    1506.01497, section 3.1.2): an anchor gets the box of its highest IoU, the first of equals, if that is at least
    `foreground_iou`, or if the anchor is among the best of any box, however low their IoU. An anchor that has an IoU of
    NaN is background.

    Waits for nothing, and runs in a CUDA graph: how many boxes are real is read on the GPU.

    Args:
        anchors: xyxy, float32, finite, x1 <= x2 and y1 <= y2.
        boxes: xyxy, float32, padded to a common M, which may be 0.
        labels: int32 or int64; -1 is padding, which matches nothing, wherever it stands in a row and whatever its box.
        foreground_iou: lowest IoU of a match.
        background_iou: anchors below it are background; at most `foreground_iou`.

    Raises:
        OptimizationError: shapes don't fit, or there is no kernel for these dtypes or this device.
    """
    _check(anchors, boxes, labels)
    if triton_runs():
        from fasttrain.callbacks.anchor_matching import in_triton  # where Triton isn't installed it can't be imported

        if in_triton.can_take(anchors, boxes, labels):
            return in_triton.match(anchors, boxes, labels, foreground_iou, background_iou)
    raise OptimizationError(
        f"anchor_matching: there is no kernel for anchors in {anchors.dtype}, boxes in {boxes.dtype} and labels in "
        f"{labels.dtype} on {labels.device.type}: anchors and boxes are float32 and labels int32 or int64, on an "
        "NVIDIA GPU with Triton installed; match by torchvision's Matcher elsewhere."
    )


class FusedAnchorMatcher(nn.Module):
    """Matches by `match_anchors` what there are kernels for, and by a plain matcher all else.

    Plain are a CPU, other dtypes than float32, and regions of torch.compile, which would break at a kernel.

    Args:
        plain: what it stands in for; see `sites.ROLE`.
    """

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.foreground_iou, self.background_iou = float(plain.foreground_iou), float(plain.background_iou)  # type: ignore[arg-type]
        # Not a submodule: it would be found as a site.
        self._plain = (plain,)

    def forward(
        self, anchors: Float[Tensor, "A 4"], boxes: Float[Tensor, "B M 4"], labels: Int[Tensor, "B M"]
    ) -> Int[Tensor, "B A"]:
        """Return for each anchor the index of its box; see `match_anchors`."""
        if torch.compiler.is_compiling() or not _has_kernel(anchors, boxes, labels):
            return self._plain[0](anchors, boxes, labels)  # type: ignore[no-any-return]
        return match_anchors(anchors, boxes, labels, self.foreground_iou, self.background_iou)

    def extra_repr(self) -> str:
        """Return the thresholds, for `print(model)`."""
        return f"foreground_iou={self.foreground_iou}, background_iou={self.background_iou}"


def _has_kernel(anchors: Tensor, boxes: Tensor, labels: Tensor) -> bool:
    if labels.device.type != "cuda" or not triton_runs():
        return False
    from fasttrain.callbacks.anchor_matching import in_triton

    return in_triton.can_take(anchors, boxes, labels)


def _check(anchors: Tensor, boxes: Tensor, labels: Tensor) -> None:
    shapes = f"{tuple(anchors.shape)}, {tuple(boxes.shape)} and {tuple(labels.shape)}"
    if anchors.dim() != 2 or anchors.shape[1] != 4 or labels.dim() != 2 or boxes.shape != (*labels.shape, 4):
        raise OptimizationError(
            f"anchor_matching: anchors are (A, 4), boxes (B, M, 4) and labels (B, M); these are {shapes}."
        )
    if not anchors.device == boxes.device == labels.device:
        raise OptimizationError(
            f"anchor_matching: anchors, boxes and labels are on one device; these are on {anchors.device}, "
            f"{boxes.device} and {labels.device}."
        )
