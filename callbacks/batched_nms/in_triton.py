"""How the candidates of a batch are put in order and the kernel is launched. Nothing waits for the GPU."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fasttrain.callbacks.batched_nms.kernel import INTERPRETED, suppress_kernel

LARGEST_SHIFTED = {"cpu": 4000, "cuda": 100_000}
"""Up to so many numbers in an image's boxes torchvision's `batched_nms` shifts each class to a place of its own; above,
it takes class by class (torchvision 0.26 and 0.29, `ops/boxes.py`)."""


@dataclass(frozen=True)
class Tiling:
    """How much a program takes at a time, powers of two."""

    candidates: int = 64
    kept: int = 64
    """Those kept so far that they are compared with."""
    warps: int = 8


TILING = Tiling()


def suppress(
    boxes: Tensor,
    scores: Tensor,
    labels: Tensor,
    is_candidate: Tensor,
    iou_threshold: float,
    most: int,
    tiling: Tiling = TILING,
) -> tuple[Tensor, Tensor]:
    """Return what is kept; see `suppression.batched_nms`, which checks the arguments."""
    batch, candidates = scores.shape
    device = boxes.device
    kept = torch.zeros((batch, most), dtype=torch.int32, device=device)
    count = torch.zeros(batch, dtype=torch.int64, device=device)
    if not scores.numel() or not most:
        return kept.long(), count
    # Those that take part come first, whatever their scores; a NaN would come before all of them.
    ranked = scores.nan_to_num(nan=torch.inf).masked_fill(~is_candidate, -torch.inf)
    order = ranked.sort(dim=1, descending=True, stable=True).indices
    end = is_candidate.sum(dim=1, dtype=torch.int32)
    in_order = _shifted(boxes, labels, is_candidate).gather(1, order.unsqueeze(2).expand(-1, -1, 4)).contiguous()
    labels_in_order = labels.gather(1, order).int()
    kept_boxes = torch.empty((batch, most, 4), dtype=torch.float32, device=device)
    kept_labels = torch.empty((batch, most), dtype=torch.int32, device=device)
    with torch.cuda.device_of(boxes):
        suppress_kernel[(batch,)](
            in_order, labels_in_order, end, kept_boxes, kept_labels, kept, count, candidates, most,
            _threshold(iou_threshold, device), CONTRACTED=device.type == "cuda", TILE=tiling.candidates,
            KEPT=tiling.kept, num_warps=tiling.warps, enable_fp_fusion=False,
        )  # fmt: skip
    index = order.gather(1, kept.long())
    is_kept = torch.arange(most, device=device) < count[:, None]
    return index.masked_fill(~is_kept, 0), count


def can_take(boxes: Tensor, scores: Tensor, labels: Tensor) -> bool:
    """Whether there is a kernel for these dtypes and this device."""
    return (
        (boxes.device.type == "cuda" or INTERPRETED.value)
        and boxes.dtype == scores.dtype == torch.float32
        and labels.dtype in (torch.int32, torch.int64)
    )


def _shifted(boxes: Tensor, labels: Tensor, is_candidate: Tensor) -> Tensor:
    """Return the boxes as torchvision compares them, rounded by what it adds to set classes apart."""
    largest = boxes.masked_fill(~is_candidate.unsqueeze(2), -torch.inf).amax(dim=(1, 2))
    offsets = labels.to(boxes) * (largest + 1)[:, None]
    few = 4 * is_candidate.sum(dim=1) <= LARGEST_SHIFTED["cuda" if boxes.is_cuda else "cpu"]
    return boxes + offsets.where(few[:, None] & is_candidate, 0.0).unsqueeze(2)


def _threshold(iou_threshold: float, device: torch.device) -> float:
    """Return the float32 that a float32 is greater than where torchvision finds it greater than the threshold."""
    nearest = np.float32(iou_threshold)
    if device.type != "cuda" and float(nearest) > iou_threshold:  # a CPU compares in double
        nearest = np.nextafter(nearest, np.float32(-np.inf))
    return float(nearest)
