"""How the Triton kernels are laid over matrices, and launched. Nothing waits for the GPU."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fasttrain.callbacks.gemm_relu.kernel import (
    INTERPRETED,
    cast_kernel,
    narrow_in_backward_kernel,
    narrow_in_fold_kernel,
    narrow_in_kernel,
    narrow_out_backward_kernel,
    narrow_out_kernel,
)
from fasttrain.callbacks.gemm_relu.product_kernel import masked_product_kernel

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_NARROW_INPUT = 31  # with the bias 32 columns, twice what tensor cores take at once
LARGEST_INPUT_OF_ONE_OUTPUT = 4096  # a row of it fits in a program's registers
_ALIGNMENT = 64  # elements: every cast parameter begins at a multiple of 128 bytes


@dataclass(frozen=True)
class Tiling:
    """How much a program takes."""

    cast_block: int = 4096
    """Elements that a program casts."""
    cast_warps: int = 8
    """Of such a program."""
    in_rows: int = 64
    """Of a tile of a narrow first layer's output."""
    in_columns: int = 128
    """Likewise."""
    in_warps: int = 4
    """Of such a program."""
    in_backward_rows: int = 64
    """Of the gradient that a program takes at once."""
    in_backward_columns: int = 64
    """Likewise."""
    in_backward_shares: int = 32
    """Programs by which the rows are shared, at most."""
    in_backward_warps: int = 4
    """Of such a program."""
    in_fold_columns: int = 128
    """Sums that a program adds up."""
    out_elements: int = 4096
    """Of a one-output layer's input that a program takes at once."""
    out_programs: int = 264
    """Of its backward at most: two on each of an H200's multiprocessors."""
    out_warps: int = 4
    """Of a program of both."""
    product_rows: int = 128
    """Of a data gradient that a program computes."""
    product_columns: int = 128
    """Likewise."""
    product_depth: int = 64
    """Of the products that it adds up at once."""
    product_group: int = 8
    """Rows of tiles that are computed together."""
    product_stages: int = 4
    """Loads on their way."""
    product_warps: int = 8
    """Of such a program."""


TILING = Tiling()


def cast(tensors: Sequence[Tensor], dtype: torch.dtype, tiling: Tiling = TILING) -> list[Tensor]:
    """Return contiguous copies of tensors in another dtype, made by one kernel, in one block of memory."""
    sources = [tensor.contiguous() for tensor in tensors]
    sizes = [tensor.numel() for tensor in sources]
    places = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    memory = torch.empty(sum(places), dtype=dtype, device=sources[0].device).split(places)
    targets = [part[:size] for part, size in zip(memory, sizes, strict=True)]
    blocks = sum(-(-size // tiling.cast_block) for size in sizes)
    if blocks:
        with torch.cuda.device_of(sources[0]):
            cast_kernel[(blocks,)](
                tuple(sources), tuple(targets), tuple(sizes), BLOCK=tiling.cast_block, num_warps=tiling.cast_warps
            )
    return [target.view(source.shape) for target, source in zip(targets, sources, strict=True)]


def narrow_in(x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype, tiling: Tiling = TILING) -> Tensor:
    """Return relu(x weight' + bias) in `dtype`, for x (M, K) with dense rows; all operands are rounded to it first."""
    (count, inputs), outputs = x.shape, len(weight)
    y = torch.empty(count, outputs, dtype=dtype, device=x.device)
    # In float32 there is no tensor core, and a product of all operands' registers: with larger tiles they spill.
    rows, columns = (min(32, tiling.in_rows), 64) if dtype == torch.float32 else (tiling.in_rows, tiling.in_columns)
    grid = -(-count // rows), -(-outputs // columns)
    with torch.cuda.device_of(x):
        narrow_in_kernel[grid](
            x, weight.contiguous(), bias.contiguous(), y, count, outputs, x.stride(0), INPUTS=inputs,
            PADDED=_padded(inputs), ROWS=rows, COLUMNS=columns, num_warps=tiling.in_warps,
        )  # fmt: skip
    return y


def narrow_in_backward(
    g: Tensor, y: Tensor | None, x: Tensor, dw: Tensor, db: Tensor, tiling: Tiling = TILING
) -> None:  # fmt: skip
    """Write the gradients of a narrow first layer's weight and bias into `dw` and `db`, which are contiguous.

    g is the gradient of the layer's output y, or of what goes into its ReLU where y is None; contiguous, like y.
    """
    (count, inputs), outputs = x.shape, g.shape[1]
    padded = _padded(inputs)
    rows, columns = tiling.in_backward_rows, tiling.in_backward_columns
    shares = max(1, min(-(-count // rows), tiling.in_backward_shares))
    partials = torch.empty(shares, outputs, padded, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        narrow_in_backward_kernel[(-(-outputs // columns), shares)](
            g, g if y is None else y, x, partials, count, outputs, x.stride(0), INPUTS=inputs, PADDED=padded,
            ROWS=rows, COLUMNS=columns, MASKED=y is None, num_warps=tiling.in_backward_warps,
        )  # fmt: skip
        narrow_in_fold_kernel[(-(-outputs * padded // tiling.in_fold_columns),)](
            partials, dw, db, shares, outputs, INPUTS=inputs, PADDED=padded, SHARES=_power_of_two(shares),
            COLUMNS=tiling.in_fold_columns,
        )  # fmt: skip


def narrow_out(y: Tensor, weight: Tensor, bias: Tensor, tiling: Tiling = TILING) -> Tensor:
    """Return y weight' + bias, (M, 1), for contiguous y (M, K) and weight (1, K)."""
    count, inputs = y.shape
    z = torch.empty(count, 1, dtype=y.dtype, device=y.device)
    padded, rows = _one_output_tile(inputs, tiling)
    with torch.cuda.device_of(y):
        narrow_out_kernel[(-(-count // rows),)](
            y, weight.contiguous(), bias, z, count, INPUTS=inputs, PADDED=padded, ROWS=rows, num_warps=tiling.out_warps
        )
    return z


def narrow_out_backward(g: Tensor, y: Tensor, weight: Tensor, tiling: Tiling = TILING) -> tuple[Tensor, Tensor]:
    """Return the gradient of what went into the ReLU that made y (M, K), and shares of sums, float32 (P, 2 K + 1).

    The sum of the shares is the gradient of the weight, of the bias of the layer below, and of the bias.
    """
    count, inputs = y.shape
    masked = torch.empty_like(y)
    padded, rows = _one_output_tile(inputs, tiling)
    programs = max(1, min(-(-count // rows), tiling.out_programs))
    partials = torch.empty(programs, 2 * inputs + 1, dtype=torch.float32, device=y.device)
    with torch.cuda.device_of(y):
        narrow_out_backward_kernel[(programs,)](
            g, y, weight.contiguous(), masked, partials, count, INPUTS=inputs, PADDED=padded, ROWS=rows,
            num_warps=tiling.out_warps,
        )  # fmt: skip
    return masked, partials


def masked_product(g: Tensor, weight: Tensor, y: Tensor, tiling: Tiling = TILING) -> tuple[Tensor, Tensor]:
    """Return g weight where y passed its ReLU, and shares of the column sums of that, float32 (P, K).

    For matrices that `can_multiply`: g (M, N), weight (N, K) and y (M, K), contiguous, of one 16-bit dtype.
    """
    (count, outputs), inputs = g.shape, weight.shape[1]
    rows, columns, depth = tiling.product_rows, tiling.product_columns, tiling.product_depth
    row_tiles = -(-count // rows)
    masked = torch.empty_like(y)
    partials = torch.empty(row_tiles, inputs, dtype=torch.float32, device=y.device)
    with torch.cuda.device_of(y):
        masked_product_kernel[(row_tiles * -(-inputs // columns),)](
            TensorDescriptor.from_tensor(g, [rows, depth]), TensorDescriptor.from_tensor(weight, [depth, columns]),
            y, masked, partials, count, inputs, outputs, ROWS=rows, COLUMNS=columns, DEPTH=depth,
            GROUP=tiling.product_group, num_stages=tiling.product_stages, num_warps=tiling.product_warps,
        )  # fmt: skip
    return masked, partials


def can_multiply(g: Tensor, weight: Tensor, y: Tensor) -> bool:
    """Whether `masked_product` takes them: 16 bits, rows of multiples of 16 bytes, on a GPU that loads by tiles."""
    return (
        all(m.dtype in (torch.float16, torch.bfloat16) for m in (g, weight, y))
        and all(m.is_contiguous() and m.shape[1] % 8 == 0 and m.data_ptr() % 16 == 0 for m in (g, weight, y))
        and (not g.is_cuda or torch.cuda.get_device_capability(g.device) >= (9, 0))
        and can_run(g.device)
    )


def can_run(device: torch.device) -> bool:
    """Whether the kernels run there: on a GPU, or in Triton's interpreter."""
    return device.type == "cuda" or bool(INTERPRETED.value)


def _padded(inputs: int) -> int:
    return max(16, _power_of_two(inputs + 1))


def _one_output_tile(inputs: int, tiling: Tiling) -> tuple[int, int]:
    padded = _power_of_two(inputs)
    return padded, max(1, tiling.out_elements // padded)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
