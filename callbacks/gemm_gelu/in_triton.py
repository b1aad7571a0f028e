"""The tier for NVIDIA GPUs: the kernels' launches. Nothing waits for the GPU."""

import torch
from torch import Tensor

from fasttrain.callbacks.gemm_gelu.form import form_for
from fasttrain.callbacks.gemm_gelu.gelu_kernel import INTERPRETED, gelu_pass_kernel
from fasttrain.callbacks.gemm_gelu.kernel import gelu_backward_kernel, linear_gelu_kernel
from fasttrain.callbacks.gemm_gelu.tiling import Launch, PassTiling, Tiling
from fasttrain.callbacks.relu_bias_backward.kernel import fold_kernel

# float32 products would be of the tensor cores' 19 bits, or not be theirs.
DTYPES = (torch.float16, torch.bfloat16) + ((torch.float32,) if INTERPRETED.value else ())

# Half of what a tile's products take, alone, is 3 us; GELU with its derivative is 4 us of instructions.
FORWARD = Tiling(stagger_ns=4000)
BACKWARD = Tiling(group=0, stagger_ns=2000)
PASS = PassTiling()
# Columns of sums that a program adds up, 64 bytes of a row, and at most so many rows at once.
_FOLD_COLUMNS, _FOLD_ROWS = 16, 256


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str, keep_slope: bool, tiling: Tiling | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return gelu(x @ weight.T + bias) and, if it is to be kept, gelu'(the same); (rows, columns) each, in x's dtype.

    x is (rows, depth), weight (columns, depth) with the same dtype, bias (columns,).
    """
    (rows, depth), columns = x.shape, weight.shape[0]
    x, weight = _rows_contiguous(x), _rows_contiguous(weight)
    hidden = x.new_empty(rows, columns)
    slope = x.new_empty(rows, columns) if keep_slope else None
    if not hidden.numel():
        return hidden, slope
    matrices = (x, weight, hidden, hidden if slope is None else slope)
    launch = Launch(matrices, rows, columns, tiling, FORWARD)
    of_tile = (launch.tiling.rows, launch.tiling.columns // launch.tiling.parts)
    blocks = ((launch.tiling.rows, launch.tiling.depth), (launch.tiling.columns, launch.tiling.depth), of_tile, of_tile)
    x_at, weight_at, hidden_at, slope_at = launch.described(blocks)
    form = form_for(approximate, x.dtype)
    with torch.cuda.device_of(x):
        linear_gelu_kernel[(launch.programs,)](
            x_at, weight_at, weight if bias is None else bias.contiguous(), hidden_at, slope_at,
            rows, columns, depth, *(m.stride(0) for m in matrices), launch.multiprocessors,
            FORM=form.coefficients, LARGEST=form.largest, HAS_BIAS=bias is not None, KEEP_SLOPE=keep_slope,
            **launch.options,
        )  # fmt: skip
    return hidden, slope


def gelu(before: Tensor, approximate: str, tiling: PassTiling | None = None) -> Tensor:
    """Return gelu(before), of the same shape and dtype; before is contiguous."""
    hidden, tiling = torch.empty_like(before), tiling or PASS
    if not hidden.numel():
        return hidden
    form = form_for(approximate, before.dtype)
    with torch.cuda.device_of(before):
        gelu_pass_kernel[(-(-before.numel() // tiling.elements),)](
            before, hidden, before.numel(), FORM=form.coefficients, LARGEST=form.largest, BLOCK=tiling.elements,
            num_warps=tiling.warps,
        )  # fmt: skip
    return hidden


def backward(
    dy: Tensor, weight: Tensor, kept: Tensor, approximate: str | None, sums: torch.dtype | None,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return (dy @ weight) * gelu' in dy's dtype, and the sums of its columns, (columns,), summed in float32.

    Args:
        dy: (rows, depth), of one dtype with weight and kept.
        weight: (depth, columns).
        kept: (rows, columns): GELU's input or its derivative.
        approximate: GELU's form if its input was kept, None if its derivative was.
        sums: the dtype of the sums, None if they are not wanted.
        tiling: by default `BACKWARD`.
    """
    (rows, depth), columns = dy.shape, weight.shape[1]
    dy, weight = _rows_contiguous(dy), _rows_contiguous(weight)
    result = torch.empty_like(kept)
    if not result.numel():
        return result, None if sums is None else dy.new_zeros(columns, dtype=sums)
    matrices = (dy, weight, kept, result)
    launch = Launch(matrices, rows, columns, tiling, BACKWARD)
    of_tile = (launch.tiling.rows, launch.tiling.columns // launch.tiling.parts)
    blocks = ((launch.tiling.rows, launch.tiling.depth), (launch.tiling.depth, launch.tiling.columns), of_tile, of_tile)
    dy_at, weight_at, kept_at, result_at = launch.described(blocks)
    shape = (0 if sums is None else launch.summed_apart, columns)
    partial_sums = torch.empty(shape, dtype=torch.float32, device=dy.device)
    form = None if approximate is None else form_for(approximate, dy.dtype)
    with torch.cuda.device_of(dy):
        gelu_backward_kernel[(launch.programs,)](
            dy_at, weight_at, kept_at, result_at, partial_sums,
            rows, columns, depth, *(m.stride(0) for m in matrices), launch.multiprocessors,
            FORM=form and form.coefficients, LARGEST=form and form.largest, COLUMN_SUMS=sums is not None,
            WARPS=launch.tiling.warps, **launch.options,
        )  # fmt: skip
    return result, None if sums is None else _folded(partial_sums, sums)


def _folded(partial_sums: Tensor, dtype: torch.dtype) -> Tensor:
    rows, columns = partial_sums.shape
    sums = partial_sums.new_empty(columns, dtype=dtype)
    at_once = min(1 << (rows - 1).bit_length(), _FOLD_ROWS)
    with torch.cuda.device_of(sums):
        fold_kernel[(-(-columns // _FOLD_COLUMNS),)](
            partial_sums, sums, rows, CHANNELS=columns, ROWS=at_once, COLUMNS=_FOLD_COLUMNS
        )
    return sums


def _rows_contiguous(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1] else matrix.contiguous()
