"""How the kernels are laid over images and anchors, and launched. Nothing waits for the GPU."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from fasttrain.callbacks.anchor_matching.kernel import BACKGROUND, INTERPRETED, list_boxes_kernel, match_kernel

LABELS = (torch.int32, torch.int64)
LISTED_AT_ONCE = 1024  # boxes, of which most are padding
SCANNED_AT_ONCE = 128  # real boxes


@dataclass(frozen=True)
class Tiling:
    """How much a program takes."""

    anchors: int = 512
    """Of a tile, a power of two."""
    warps: int = 4
    """Of a program."""


TILING = Tiling()


def match(
    anchors: Tensor,
    boxes: Tensor,
    labels: Tensor,
    foreground_iou: float,
    background_iou: float,
    tiling: Tiling = TILING,
) -> Tensor:
    """Return each anchor's box, int64 (B, A); see `matcher.match_anchors`, which checks the arguments."""
    (batch, most), anchor_count, device = labels.shape, len(anchors), labels.device
    matched = torch.empty((batch, anchor_count), dtype=torch.int64, device=device)
    if not matched.numel():
        return matched
    if not most:
        return matched.fill_(BACKGROUND.value)
    anchors = anchors.contiguous()
    tiles = triton.cdiv(anchor_count, tiling.anchors)
    count = torch.empty(batch, dtype=torch.int32, device=device)
    index, highest = torch.empty((2, batch, most), dtype=torch.int32, device=device)
    corners = torch.empty((batch, most, 4), dtype=torch.float32, device=device)
    highest_of_tile = torch.empty((batch, tiles, most), dtype=torch.int32, device=device)
    listed = min(LISTED_AT_ONCE, triton.next_power_of_2(most))
    with torch.cuda.device_of(labels):
        list_boxes_kernel[(batch,)](
            boxes, labels, count, index, corners, highest, most, *boxes.stride(), *labels.stride(), BLOCK=listed
        )
        for rescue in (False, True):
            match_kernel[(batch * tiles,)](
                anchors, count, index, corners, highest, highest_of_tile, matched, anchor_count, tiles, most,
                foreground_iou, background_iou, RESCUE=rescue, BLOCK=tiling.anchors, SCANNED=SCANNED_AT_ONCE,
                num_warps=tiling.warps, enable_fp_fusion=False,
            )  # fmt: skip
    return matched


def can_take(anchors: Tensor, boxes: Tensor, labels: Tensor) -> bool:
    """Whether there are kernels for these dtypes and this device."""
    return (
        (labels.device.type == "cuda" or INTERPRETED.value)
        and anchors.dtype == boxes.dtype == torch.float32
        and labels.dtype in LABELS
    )
