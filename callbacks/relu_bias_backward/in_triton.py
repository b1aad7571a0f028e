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
    warps: int = 4
    """Of a program."""
    programs: int = 528
    """In all, 4 for each of an H200's multiprocessors; each writes the sums of its columns once."""
    fold_rows: int = 256
    """Rows of sums that a program of the second kernel takes at once, 16 columns wide."""
    fold_warps: int = 8
    """Of a program of the second kernel."""


TILING = Tiling()
_FOLD_COLUMNS = 16


def relu_bias_backward(g: Tensor, y: Tensor | None, tiling: Tiling = TILING) -> tuple[Tensor | None, Tensor]:
    """Return g where y > 0 (0 elsewhere; None without y), in g's dtype, and its column sums, float32 (C,).

    g and y are (M, C), dense, float16, bfloat16 or float32.
    """
    count, channels = g.shape
    masked = None if y is None else torch.empty_like(g)
    if not g.numel():
        return masked, torch.zeros(channels, dtype=torch.float32, device=g.device)
    together = rows_together(count, channels, tiling.columns)
    rows, width = count // together, channels * together
    columns = min(tiling.columns, 2 ** math.ceil(math.log2(width)))
    tile_rows = max(1, tiling.elements // columns)
    tiles, blocks = -(-rows // tile_rows), -(-width // columns)
    programs = max(1, min(tiles, tiling.programs // blocks))
    partials = torch.empty(programs * together, channels, dtype=torch.float32, device=g.device)
    sums = torch.empty(channels, dtype=torch.float32, device=g.device)
    with torch.cuda.device_of(g):
        backward_kernel[(programs, blocks)](
            g, g if y is None else y, g if masked is None else masked, partials, rows, tiles, WIDTH=width,
            RELU=y is not None, ROWS=tile_rows, COLUMNS=columns, num_warps=tiling.warps,
        )  # fmt: skip
        fold_kernel[(-(-channels // _FOLD_COLUMNS),)](
            partials, sums, len(partials), CHANNELS=channels, ROWS=tiling.fold_rows, COLUMNS=_FOLD_COLUMNS,
            num_warps=tiling.fold_warps,
        )  # fmt: skip
    return masked, sums


def rows_together(count: int, channels: int, columns: int) -> int:
    """Return how many rows to see as one, so that it fills tiles of so many columns, as far as `count` allows."""
    wanted = columns // math.gcd(channels, columns)
    return math.gcd(count, wanted)
