"""The tier for NVIDIA GPUs: how the kernels are laid over a matrix, and launched. Nothing waits for the GPU."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fasttrain.callbacks.relu_bias_backward.kernel import backward_kernel, fold_kernel

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Tiling:
    """How much a program takes."""

    elements: int = 4096
    """Of a tile, which lie in `elements / columns` rows; each has a sum of its own in a register."""
    columns: int = 256
    """Of a tile: 512 bytes of a row in 16 bits."""
    warps: int = 2
    """Of a program."""
    programs: int = 792
    """At most, in all; each writes the sums of its columns once. By their registers an H200 holds 6 of these at once
    on each of its 132 multiprocessors, and one more would begin when the others are done."""
    fewest: int = 264
    """Programs at least, in all, as long as there is a tile for each."""
    tiles: int = 5
    """For each program in between: a small matrix is not worth as many lines of sums as a large one."""
    fold_rows: int = 256
    """Rows of sums that a program of the second kernel takes at once."""
    fold_columns: int = 16
    """Columns of these, 64 bytes."""
    fold_warps: int = 8
    """Of a program of the second kernel."""


MASKED = Tiling()
"""With a ReLU to go back through."""
SUMS = Tiling(programs=1056)
"""Without: half the registers, for 10 at once."""
WIDE_SUMS = Tiling(warps=8, programs=1056)
"""Without, for rows of many tiles, where few programs share a column: of 8 warps, 8 at once."""
_WIDE = 64


def relu_bias_backward(g: Tensor, y: Tensor | None, tiling: Tiling | None = None) -> tuple[Tensor | None, Tensor]:
    """Return g where y > 0 (0 elsewhere; None without y), in g's dtype, and its column sums, float32 (C,).

    g and y are (M, C), dense, float16, bfloat16 or float32. Without a tiling there is one for each form.
    """
    count, channels = g.shape
    masked = None if y is None else torch.empty_like(g)
    if not g.numel():
        return masked, torch.zeros(channels, dtype=torch.float32, device=g.device)
    tiling = tiling or tiling_for(count, channels, y is not None)
    together = rows_together(count, channels, tiling.columns)
    rows, width = count // together, channels * together
    columns = min(tiling.columns, 2 ** math.ceil(math.log2(width)))
    tile_rows = max(1, tiling.elements // columns)
    tiles, blocks = -(-rows // tile_rows), -(-width // columns)
    programs = programs_for(tiles, blocks, tiling)
    partials = torch.empty(programs * together, channels, dtype=torch.float32, device=g.device)
    sums = torch.empty(channels, dtype=torch.float32, device=g.device)
    with torch.cuda.device_of(g):
        backward_kernel[(programs, blocks)](
            g, g if y is None else y, g if masked is None else masked, partials, rows, tiles, WIDTH=width,
            RELU=y is not None, ROWS=tile_rows, COLUMNS=columns, num_warps=tiling.warps,
        )  # fmt: skip
        fold_kernel[(-(-channels // tiling.fold_columns),)](
            partials, sums, len(partials), CHANNELS=channels, ROWS=tiling.fold_rows, COLUMNS=tiling.fold_columns,
            num_warps=tiling.fold_warps,
        )  # fmt: skip
    return masked, sums


def rows_together(count: int, channels: int, columns: int) -> int:
    """Return how many rows to see as one, so that it fills tiles of so many columns, as far as `count` allows."""
    wanted = columns // math.gcd(channels, columns)
    return math.gcd(count, wanted)


def tiling_for(count: int, channels: int, relu: bool) -> Tiling:
    """Return what measured best for a matrix (count, channels), with a ReLU or without."""
    if relu:
        return MASKED
    width = channels * rows_together(count, channels, SUMS.columns)
    return WIDE_SUMS if width > _WIDE * SUMS.columns else SUMS


def programs_for(tiles: int, blocks: int, tiling: Tiling) -> int:
    """Return how many programs share the tiles of each of `blocks` blocks of columns."""
    wanted = max(tiling.fewest // blocks, tiles // tiling.tiles)
    return max(1, min(tiles, tiling.programs // blocks, wanted))
