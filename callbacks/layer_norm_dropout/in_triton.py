"""The tier for NVIDIA GPUs: how the kernels are laid over the rows, and launched. Nothing waits for the GPU."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fasttrain.callbacks.layer_norm_dropout.kernel import INTERPRETED, backward_kernel, forward_kernel, sum_kernel
from fasttrain.callbacks.layer_norm_dropout.mask import GROUP, ROUNDS, threshold
from fasttrain.environment import multiprocessors

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_HIDDEN = 8192  # of a row that one program's registers hold, with the sums of three gradients
MOST_WARPS = 16
# An interpreted program takes its time: few of them, and more than one, so that rows are dealt out.
INTERPRETED_PROGRAMS = 3


@dataclass(frozen=True)
class Tile:
    """How much a program takes at once."""

    rows: int = 1
    """Of a tile."""
    elements: int = 8
    """Of a row that a thread holds, which decides how many warps there are."""
    programs: int = 8
    """On each multiprocessor; fewer, if there are not so many tiles."""
    stages: int = 1
    """Tiles on their way."""


@dataclass(frozen=True)
class Tiling:
    """How the three kernels are laid out."""

    forward: Tile = Tile(programs=200)
    """Of the forward: as good as one program for each row, which a sweep on an H200 found the fastest."""
    backward: Tile = Tile(programs=6)
    """Of the backward, whose programs each leave a part of the parameters' gradients."""
    sum_columns: int = 16
    """Of a program that adds the parts up."""
    keep_normalized: bool = True
    """Write the normalized rows in the forward, or read x and the residual again in the backward."""
    rounds: int = ROUNDS
    """Of Philox."""


TILING = Tiling()


class Kept(NamedTuple):
    """What the backward needs of the forward."""

    normalized: Tensor | None
    mean: Tensor
    rstd: Tensor


class Inputs(NamedTuple):
    """What both kernels read. Rows are contiguous, of (rows, H); parameters (H,); seed int64 (1,) if any is dropped."""

    x: Tensor
    residual: Tensor | None
    x_bias: Tensor | None
    weight: Tensor | None
    seed: Tensor | None


class Gradients(NamedTuple):
    """Of what was wanted, in its dtype."""

    x: Tensor | None
    residual: Tensor | None
    x_bias: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class Wanted(NamedTuple):
    """The dtype of each gradient that is wanted."""

    x: torch.dtype | None
    residual: torch.dtype | None
    x_bias: torch.dtype | None
    weight: torch.dtype | None
    bias: torch.dtype | None


def can_take(hidden: int, tensors: list[Tensor]) -> bool:
    """Whether there is a kernel for rows of this size, and for these tensors' device and dtypes."""
    return hidden <= LARGEST_HIDDEN and all(
        (tensor.device.type == "cuda" or INTERPRETED.value) and tensor.dtype in DTYPES for tensor in tensors
    )


def keeps_normalized(residual: Tensor | None, tiling: Tiling = TILING) -> bool:
    """Whether the normalized rows are what the backward reads.

    With a residual it makes no difference in bytes: they are written once and read once, instead of x and the residual
    read once more. Without one, x alone is less.
    """
    return residual is not None and tiling.keep_normalized


def forward(
    inputs: Inputs, bias: Tensor | None, p: float, eps: float, dtype: torch.dtype, keep: bool, tiling: Tiling = TILING
) -> tuple[Tensor, Kept]:
    """Return y in `dtype`, and what the backward needs: without the normalized rows if not `keep`."""
    x, residual, x_bias, weight, seed = inputs
    y = torch.empty_like(x, dtype=dtype)
    normalized = torch.empty_like(y) if keep and keeps_normalized(residual, tiling) else None
    mean, rstd = torch.empty(2, x.shape[0], dtype=torch.float32, device=x.device)
    if x.numel():
        programs, options = _layout(x, tiling.forward, tiling.rounds)
        with torch.cuda.device_of(x):
            forward_kernel[(programs,)](
                x, _or(residual, x), _or(x_bias, x), _or(weight, x), _or(bias, x), _or(seed, x), y,
                _or(normalized, y), mean, rstd, x.shape[0], threshold(p), _scale(p), eps, RESIDUAL=residual is not None,
                X_BIAS=x_bias is not None, WEIGHT=weight is not None, BIAS=bias is not None, DROPOUT=seed is not None,
                KEEP_NORMALIZED=normalized is not None, **options,
            )  # fmt: skip
    return y, Kept(normalized, mean, rstd)


def backward(
    dy: Tensor, dy_twin: Tensor | None, inputs: Inputs, kept: Kept, p: float, wanted: Wanted, tiling: Tiling = TILING
) -> Gradients:
    """Return the gradients that are wanted. dy and dy_twin are contiguous; x may be anything if normalized is kept."""
    x, residual, x_bias, weight, seed = inputs
    rows, hidden = dy.shape
    # Where nothing is dropped x and the residual have the same gradient.
    one_for_both = seed is None and wanted.x is not None and wanted.x == wanted.residual
    dx = None if wanted.x is None else torch.empty_like(dy, dtype=wanted.x)
    dresidual = None if wanted.residual is None or one_for_both else torch.empty_like(dy, dtype=wanted.residual)
    sums = [
        None if dtype is None else torch.empty(hidden, dtype=dtype, device=dy.device)
        for dtype in (wanted.weight, wanted.bias, wanted.x_bias)
    ]
    if dy.numel():
        programs, options = _layout(dy, tiling.backward, tiling.rounds)
        parts = torch.empty(3, programs, hidden, dtype=torch.float32, device=dy.device)
        want_sums = {
            f"WANT_{name}": total is not None for name, total in zip(("DWEIGHT", "DBIAS", "DX_BIAS"), sums, strict=True)
        }
        with torch.cuda.device_of(dy):
            backward_kernel[(programs,)](
                dy, _or(dy_twin, dy), x, _or(residual, dy), _or(x_bias, dy), _or(kept.normalized, dy), _or(weight, dy),
                kept.mean, kept.rstd, _or(seed, dy), _or(dx, dy), _or(dresidual, dy), parts, rows, threshold(p),
                _scale(p), RESIDUAL=residual is not None, X_BIAS=x_bias is not None, WEIGHT=weight is not None,
                DROPOUT=seed is not None, KEPT_NORMALIZED=kept.normalized is not None, TWIN=dy_twin is not None,
                WANT_DX=dx is not None, WANT_DRESIDUAL=dresidual is not None, **want_sums, **options,
            )  # fmt: skip
            if any(want_sums.values()):
                sum_kernel[(-(-hidden // tiling.sum_columns), 3)](
                    parts, *(_or(total, parts) for total in sums), programs, HIDDEN=hidden, COLUMNS=tiling.sum_columns,
                    PARTS=64, num_warps=4, **want_sums,
                )  # fmt: skip
    else:
        for total in sums:
            if total is not None:
                total.zero_()
    return Gradients(dx, dx if one_for_both else dresidual, sums[2], sums[0], sums[1])


def _layout(x: Tensor, tile: Tile, rounds: int) -> tuple[int, dict[str, Any]]:
    """Return how many programs there are, and the options of a launch."""
    rows, hidden = x.shape
    groups = triton.next_power_of_2(-(-hidden // GROUP))
    warps = min(MOST_WARPS, max(1, tile.rows * groups * GROUP // (32 * tile.elements)))
    tiles = -(-rows // tile.rows)
    most = INTERPRETED_PROGRAMS if INTERPRETED.value else tile.programs * multiprocessors(x.device)
    options = {
        "HIDDEN": hidden, "GROUPS": groups, "ROWS": tile.rows, "ROUNDS": rounds, "STAGES": tile.stages,
        "num_warps": warps,
    }  # fmt: skip
    return min(tiles, most), options


def _scale(p: float) -> float:
    return 1 / (1 - p) if p < 1 else 0.0


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return a pointer's worth of something where a kernel will not look."""
    return other if tensor is None else tensor
