"""The tier for NVIDIA GPUs: how the kernels are laid over a feature map, and launched. Nothing waits for the GPU."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fasttrain.callbacks.folded_norm import ScaleBias
from fasttrain.callbacks.frozen_bn.in_torch import result_dtype
from fasttrain.callbacks.frozen_bn.kernel import WIDTH, backward_kernel, forward_kernel

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Tiling:
    """How much a program takes."""

    vectors: int = 128
    """Vectors of 8 elements in a tile: one for each thread, so that scale and bias take 16 registers of it."""
    warps: int = 4
    """Of a program."""
    tiles: int = 8
    """That a program takes, one after another, with its scale and bias loaded once."""


TILING = Tiling()


def forward(
    x: Tensor, folded: ScaleBias, z: Tensor | None, z_folded: ScaleBias | None, keep_mask: bool, tiling: Tiling = TILING
) -> tuple[Tensor, Tensor]:
    """Return y, and the mask of the backward, uint8 (ceil(elements / 8),): empty if not to be kept.

    x and z are (N, C, H, W), dense, in the same one of the two memory formats, which y gets too.
    """
    y = torch.empty_like(x, dtype=result_dtype(x, z))
    mask = torch.empty(-(-x.numel() // WIDTH.value) if keep_mask else 0, dtype=torch.uint8, device=x.device)
    if x.numel():
        launch = _Launch(x, tiling)
        second = folded if z_folded is None else z_folded
        with torch.cuda.device_of(x):
            forward_kernel[(launch.programs,)](
                x, x if z is None else z, y, mask, *folded, *second, *launch.sizes, ADD=z is not None,
                DUAL=z_folded is not None, KEEP_MASK=keep_mask, **launch.options,
            )  # fmt: skip
    return y, mask


def backward(
    dy: Tensor, dy_twin: Tensor | None, mask: Tensor, x_scale: Tensor, z_scale: Tensor | None,
    dx_dtype: torch.dtype | None, dz_dtype: torch.dtype | None, tiling: Tiling = TILING,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return dx and dz in the dtypes given, None for one whose dtype is None. dy and dy_twin are dense, as x was."""
    dx = None if dx_dtype is None else torch.empty_like(dy, dtype=dx_dtype)
    dz = None if dz_dtype is None else torch.empty_like(dy, dtype=dz_dtype)
    if dy.numel() and (dx is not None or dz is not None):
        launch = _Launch(dy, tiling)
        with torch.cuda.device_of(dy):
            backward_kernel[(launch.programs,)](
                dy, dy if dy_twin is None else dy_twin, mask, dy if dx is None else dx, dy if dz is None else dz,
                x_scale, x_scale if z_scale is None else z_scale, *launch.sizes, TWIN=dy_twin is not None,
                DUAL=z_scale is not None, WANT_DX=dx is not None, WANT_DZ=dz is not None, **launch.options,
            )  # fmt: skip
    return dx, dz


class _Launch:
    """What is the same for both kernels over one feature map."""

    def __init__(self, x: Tensor, tiling: Tiling) -> None:
        channels, pixels = x.shape[1], x.shape[2] * x.shape[3]
        tile = tiling.vectors * WIDTH.value
        tiles = -(-x.numel() // tile)
        # From tile to tile of a program the channels must be the same.
        period = channels // math.gcd(channels, tile)
        self.programs = -(-tiles // tiling.tiles // period) * period
        self.sizes = (x.numel(), tiles, pixels)
        self.options: dict[str, Any] = {
            "CHANNELS": channels,
            "CHANNELS_LAST": x.is_contiguous(memory_format=torch.channels_last),
            "VECTORS": tiling.vectors,
            "num_warps": tiling.warps,
        }
