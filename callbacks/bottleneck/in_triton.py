"""The tier for NVIDIA GPUs: data gradients of 1x1 convolutions by a Triton product, or by cuDNN and one pass after it.

The product adds the residual and applies the gate to its sums. cuDNN's data gradient has to be read and written once
more for that, but is the faster one, by more than that pass takes, wherever channels are many and pixels few.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fasttrain.callbacks.bottleneck import in_torch
from fasttrain.callbacks.bottleneck.convolution import LAST, projection_gradient
from fasttrain.callbacks.bottleneck.kernel import add_kernel, gate_kernel, product_kernel, scale_kernel

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# A float32 tile would need twice the shared memory, and its weights the other way round.
PRODUCT_DTYPES = (torch.float16, torch.bfloat16)
# Most channels of the gradient that comes in, and of the one that goes out, with which a product is taken. Product/
# cuDNN and pass, ms, on an NVIDIA H200, PyTorch 2.11.0+cu130, cuDNN 9.19, Triton 3.6, fp16, batch 16, 2026-11-30, for
# products that did not fetch ahead yet, and passes added up from their bytes at 4.2 TB/s: 256 -> 64 at 200 x 200
# .127/.156, 64 -> 256 with residual .315/.353; 512 -> 128 at 100 x 100 .088/.083, 128 -> 512 .197/.180; 1024 -> 256 at
# 50 x 50 .063/.054, 256 -> 1024 .115/.101; 2048 -> 512 at 25 x 25 .061/.038, 512 -> 2048 .095/.068.
PRODUCT_DEPTH, PRODUCT_COLUMNS = 256, 256
# The smallest that the tensor cores take.
LEAST_CHANNELS = 16
# Older GPUs don't have the shared memory.
LEAST_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Tiling:
    """How much of a product a program takes."""

    rows: int = 64
    """Pixels of a tile."""
    columns: int = 64
    """Output channels of a tile, at most. The input is read from the L2 cache once for each."""
    warps: int = 4
    """Of a program."""
    stages: int = 3
    """Tiles under way: the present one, and those that are being fetched."""
    programs: int = 396
    """In all: as many as an H200's 132 multiprocessors have shared memory for."""
    registers: int | None = None
    """Limit for each thread."""


SHALLOW, DEEP = Tiling(), Tiling(stages=2, programs=264)
DEEP_FROM = 256
# Of a pass: four vectors of 8 for each thread. Of a weight's: one, because the smallest have 4096 in all.
PASS_ELEMENTS, SCALED_ELEMENTS = 4096, 1024


def pointwise_backward(g: Tensor, weight: Tensor, gate: Tensor | None, add: Tensor | None, step: int) -> Tensor:
    """See `Operators`."""
    if step == 1 and (gate is not None or add is not None) and takes_product(g, weight):
        return product(g, weight, gate, add)
    dx = projection_gradient(g, weight)
    if add is not None and step > 1:
        add_at_every(dx, add, step)
        add = None
    return dx if gate is None and add is None else gated(dx, gate, add, in_place=True)


def takes_product(g: Tensor, weight: Tensor) -> bool:
    """Whether there is a product for these, and it is the faster way."""
    depth, columns = weight.shape[:2]
    pays = depth <= PRODUCT_DEPTH and columns <= PRODUCT_COLUMNS
    fits = depth & (depth - 1) == 0 and depth >= LEAST_CHANNELS and columns % LEAST_CHANNELS == 0
    has_room = not g.is_cuda or torch.cuda.get_device_capability(g.device) >= LEAST_CAPABILITY
    return pays and fits and has_room and g.dtype in PRODUCT_DTYPES


def product(
    g: Tensor, weight: Tensor, gate: Tensor | None, add: Tensor | None, tiling: Tiling | None = None
) -> Tensor:  # fmt: skip
    """Return gate(g back through a 1x1 convolution of stride 1 [+ add]), all in one kernel.

    Args:
        g: (N, depth, H, W), channels_last.
        weight: (depth, columns, 1, 1); depth is a power of two, 16 or more, and columns are a multiple of 16.
        gate: (N, columns, H, W), channels_last.
        add: likewise.
        tiling: its columns are cut down to what divides the channels.
    """
    depth, columns = weight.shape[:2]
    dx = _empty_map(g, columns)
    rows = g.numel() // depth
    if not rows:
        return dx
    tiling = tiling or (DEEP if depth >= DEEP_FROM else SHALLOW)
    tile_columns = min(columns & -columns, tiling.columns)
    tiles, across = -(-rows // tiling.rows), columns // tile_columns
    options: dict[str, Any] = {} if tiling.registers is None else {"maxnreg": tiling.registers}
    with torch.cuda.device_of(g):
        product_kernel[(across * min(tiles, max(1, tiling.programs // across)),)](
            g, weight, g if add is None else add, g if gate is None else gate, dx, rows, tiles, DEPTH=depth,
            COLUMNS=columns, ADD=add is not None, GATE=gate is not None, TILE_ROWS=tiling.rows,
            TILE_COLUMNS=tile_columns, STAGES=tiling.stages, num_warps=tiling.warps, **options,
        )  # fmt: skip
    return dx


def gated(
    g: Tensor, gate: Tensor | None, other: Tensor | None, in_place: bool, elements: int = PASS_ELEMENTS
) -> Tensor:  # fmt: skip
    """See `Operators`; without a gate the other is added."""
    y = g if in_place else _empty_map(g, g.shape[1])
    if g.numel():
        with torch.cuda.device_of(g):
            gate_kernel[(-(-g.numel() // elements),)](
                g, g if other is None else other, g if gate is None else gate, y, g.numel(), OTHER=other is not None,
                GATE=gate is not None, ELEMENTS=elements, num_warps=4,
            )  # fmt: skip
    return y


def scale(weight: Tensor, scale: Tensor, out: Tensor) -> None:
    """See `Operators`."""
    formats = torch.contiguous_format, LAST
    if not any(weight.is_contiguous(memory_format=f) and out.is_contiguous(memory_format=f) for f in formats):
        in_torch.scale(weight, scale, out)
        return
    with torch.cuda.device_of(weight):
        scale_kernel[(-(-weight.numel() // SCALED_ELEMENTS),)](
            weight, scale, out, weight.numel(), weight[0].numel(), ELEMENTS=SCALED_ELEMENTS, num_warps=4
        )


def add_at_every(y: Tensor, small: Tensor, step: int, elements: int = PASS_ELEMENTS) -> None:
    """Add a small map to every step-th pixel of y, both channels_last: `y[..., ::step, ::step] += small`."""
    if not small.numel():
        return
    n, channels, height, width = small.shape
    pixels = n * height * width
    tile_channels = min(256, 1 << (channels - 1).bit_length())
    tile_pixels = elements // tile_channels
    with torch.cuda.device_of(y):
        add_kernel[(-(-pixels // tile_pixels), -(-channels // tile_channels))](
            small, y, pixels, channels, *y.shape[2:], height, width, STEP=step, PIXELS=tile_pixels,
            CHANNELS=tile_channels, num_warps=4,
        )  # fmt: skip


def _empty_map(like: Tensor, channels: int) -> Tensor:
    n, _, height, width = like.shape
    return torch.empty(n, channels, height, width, dtype=like.dtype, device=like.device, memory_format=LAST)
