"""The body: non-maximum suppression of a whole batch by the kernel, as a function and as a module. For any loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fasttrain.environment import triton_runs
from fasttrain.errors import OptimizationError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


@torch.no_grad()
def batched_nms(
    boxes: Float[Tensor, "B N 4"],
    scores: Float[Tensor, "B N"],
    labels: Int[Tensor, "B N"],
    is_candidate: Bool[Tensor, "B N"],
    iou_threshold: float = 0.5,
    most: int = 300,
) -> tuple[Int[Tensor, "B D"], Int[Tensor, " B"]]:
    """Return the indices of the candidates kept, int64, best first and 0 behind them, and how many they are, int64.

    For each image the first `most` of what `torchvision.ops.batched_nms` keeps of its candidates on this device: of two
    with the same label whose IoU is greater than the threshold the better one stays, of equal scores the one that
    stands first comes first.

    Waits for nothing, and runs in a CUDA graph.

    Args:
        boxes: xyxy, float32, finite.
        scores: float32, no NaN.
        labels: int32 or int64, from 0 on.
        is_candidate: False for what doesn't take part, padding for instance.
        iou_threshold: a greater IoU suppresses.
        most: D.

    Raises:
        OptimizationError: shapes don't fit, or there is no kernel for these dtypes or this device.
    """
    _check(boxes, scores, labels, is_candidate)
    if has_kernel(boxes, scores, labels):
        from fasttrain.callbacks.batched_nms import in_triton  # where Triton isn't installed it can't be imported

        return in_triton.suppress(boxes, scores, labels, is_candidate, iou_threshold, most)
    raise OptimizationError(
        f"batched_nms: there is no kernel for boxes in {boxes.dtype}, scores in {scores.dtype} and labels in "
        f"{labels.dtype} on {boxes.device.type}: boxes and scores are float32 and labels int32 or int64, on an NVIDIA "
        "GPU with Triton installed; suppress image by image with torchvision.ops.batched_nms elsewhere."
    )


class BatchedSuppression(nn.Module):
    """Suppresses by `batched_nms` what there is a kernel for, and by a plain module all else.

    Args:
        plain: what it stands in for; see `sites.ROLE`.
    """

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.iou_threshold, self.most = float(plain.iou_threshold), int(plain.most)  # type: ignore[arg-type]
        self._plain = (plain,)  # not a submodule: it would be found as a site

    def forward(
        self,
        boxes: Float[Tensor, "B N 4"],
        scores: Float[Tensor, "B N"],
        labels: Int[Tensor, "B N"],
        is_candidate: Bool[Tensor, "B N"],
    ) -> tuple[Int[Tensor, "B D"], Int[Tensor, " B"]]:
        """Return what is kept; see `batched_nms`."""
        if torch.compiler.is_compiling() or not has_kernel(boxes, scores, labels):
            return self._plain[0](boxes, scores, labels, is_candidate)  # type: ignore[no-any-return]
        return batched_nms(boxes, scores, labels, is_candidate, self.iou_threshold, self.most)

    def extra_repr(self) -> str:
        """Return the limits, for `print(model)`."""
        return f"iou_threshold={self.iou_threshold}, most={self.most}"


def has_kernel(boxes: Tensor, scores: Tensor, labels: Tensor) -> bool:
    """Whether the kernel can be launched here, on these."""
    if not triton_runs():
        return False
    from fasttrain.callbacks.batched_nms import in_triton

    return in_triton.can_take(boxes, scores, labels)


def _check(boxes: Tensor, scores: Tensor, labels: Tensor, is_candidate: Tensor) -> None:
    shapes = [tuple(each.shape) for each in (boxes, scores, labels, is_candidate)]
    if scores.dim() != 2 or shapes != [(*scores.shape, 4), *([tuple(scores.shape)] * 3)]:
        raise OptimizationError(
            "batched_nms: boxes are (B, N, 4), and scores, labels and is_candidate (B, N); these are "
            f"{', '.join(map(str, shapes[:3]))} and {shapes[3]}."
        )
    if is_candidate.dtype != torch.bool:
        raise OptimizationError(f"batched_nms: is_candidate is bool; this is {is_candidate.dtype}.")
    if len({each.device for each in (boxes, scores, labels, is_candidate)}) > 1:
        raise OptimizationError(
            "batched_nms: boxes, scores, labels and is_candidate are on one device; these are on "
            f"{boxes.device}, {scores.device}, {labels.device} and {is_candidate.device}."
        )
