"""The tier for NVIDIA GPUs: how the products are laid over the card, and launched. Nothing waits for the GPU."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-untyped]

from fasttrain.callbacks.gemm_gelu.form import form_for
from fasttrain.callbacks.gemm_gelu.kernel import INTERPRETED, gelu_backward_kernel, linear_gelu_kernel

# float32 products would be of the tensor cores' 19 bits, or not be theirs.
DTYPES = (torch.float16, torch.bfloat16) + ((torch.float32,) if INTERPRETED.value else ())
# A tensor descriptor's addresses and strides are multiples of this.
TMA_BYTES = 16
INTERPRETED_MULTIPROCESSORS = 3


@dataclass(frozen=True)
class Tiling:
    """How much a program takes at once, and how many there are."""

    rows: int = 128
    """Of a tile of the result."""
    columns: int = 128
    """Of a tile. The sums of a tile of 128 x 128 take 128 registers of each of 128 threads."""
    depth: int = 64
    """Products at once: 128 bytes of each row, in 16 bits."""
    warps: int = 4
    """Of a program."""
    stages: int = 3
    """Loads on their way. Three of 32 KiB, and half a tile to be stored, leave room for a second program."""
    parts: int = 2
    """In which a tile leaves the registers: 1, 2 or 4."""
    group: int = 8
    """Rows of tiles that are gone through column by column."""
    programs: int = 2
    """On each multiprocessor, which take tiles in turn; 0 for a program of its own for each tile."""
    flatten: bool = False
    """The first loads for a program's next tile begin before it is through with the last."""
    stagger_ns: int = 0
    """By which a multiprocessor's second program starts later than its first."""


# Where there are no tensor descriptors: products of 16 KiB, so that they also fit into 100 KiB of shared memory.
BY_POINTERS = Tiling(depth=32, warps=8, parts=1, programs=0)
# Half of what a tile's products take, alone, is 3 us; GELU with its derivative is 4 us of instructions.
FORWARD = Tiling(stagger_ns=4000)
BACKWARD = Tiling(stagger_ns=2000)
# Tiles for each multiprocessor from which on a late start is worth its while.
STAGGERED_FROM = 8


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
    launch = _Launch(matrices, rows, columns, tiling, FORWARD)
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


def backward(
    dy: Tensor, weight: Tensor, slope: Tensor, want_sums: bool, tiling: Tiling | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return (dy @ weight) * slope in dy's dtype, and the sums of its columns, float32 (columns,), if wanted.

    dy is (rows, depth), weight (depth, columns), slope (rows, columns), all of one dtype.
    """
    (rows, depth), columns = dy.shape, weight.shape[1]
    dy, weight = _rows_contiguous(dy), _rows_contiguous(weight)
    result = torch.empty_like(slope)
    if not result.numel():
        return result, dy.new_zeros(columns, dtype=torch.float32) if want_sums else None
    matrices = (dy, weight, slope, result)
    launch = _Launch(matrices, rows, columns, tiling, BACKWARD)
    of_tile = (launch.tiling.rows, launch.tiling.columns // launch.tiling.parts)
    blocks = ((launch.tiling.rows, launch.tiling.depth), (launch.tiling.depth, launch.tiling.columns), of_tile, of_tile)
    dy_at, weight_at, slope_at, result_at = launch.described(blocks)
    shape = (-(-rows // launch.tiling.rows) if want_sums else 0, columns)
    partial_sums = torch.empty(shape, dtype=torch.float32, device=dy.device)
    with torch.cuda.device_of(dy):
        gelu_backward_kernel[(launch.programs,)](
            dy_at, weight_at, slope_at, result_at, partial_sums,
            rows, columns, depth, *(m.stride(0) for m in matrices), launch.multiprocessors,
            COLUMN_SUMS=want_sums, **launch.options,
        )  # fmt: skip
    return result, partial_sums.sum(dim=0) if want_sums else None


class _Launch:
    """What is the same for both kernels: the tiling, the programs, and how memory is reached."""

    def __init__(
        self, matrices: tuple[Tensor, ...], rows: int, columns: int, tiling: Tiling | None, default: Tiling
    ) -> None:
        self.matrices = matrices
        device = matrices[0].device
        self.by_descriptors = _has_tma(device) and all(map(_can_be_described, matrices))
        self.tiling = tiling or (default if self.by_descriptors else BY_POINTERS)
        self.multiprocessors = _multiprocessors(device)
        tiles = -(-rows // self.tiling.rows) * -(-columns // self.tiling.columns)
        most = self.tiling.programs * self.multiprocessors
        self.programs = min(tiles, most) if most else tiles
        self.options: dict[str, Any] = {
            "TMA": self.by_descriptors,
            "BLOCK_M": self.tiling.rows,
            "BLOCK_N": self.tiling.columns,
            "BLOCK_K": self.tiling.depth,
            "GROUP": self.tiling.group,
            "PARTS": self.tiling.parts,
            "STAGGER_NS": self.tiling.stagger_ns if tiles >= STAGGERED_FROM * self.multiprocessors else 0,
            "PERSISTENT": self.programs < tiles,
            "FLATTEN": self.tiling.flatten and self.programs < tiles,
            "num_warps": self.tiling.warps,
            "num_stages": self.tiling.stages,
        }

    def described(self, blocks: tuple[tuple[int, int], ...]) -> list[Any]:
        """Return the kernel's arguments for the matrices, which are gone through in such blocks."""
        if not self.by_descriptors:
            return list(self.matrices)
        pairs = zip(self.matrices, blocks, strict=True)
        return [TensorDescriptor.from_tensor(matrix, list(block)) for matrix, block in pairs]


def _can_be_described(matrix: Tensor) -> bool:
    stride_bytes = matrix.stride(0) * matrix.element_size()
    return matrix.data_ptr() % TMA_BYTES == 0 and stride_bytes % TMA_BYTES == 0 and matrix.numel() > 0


def _rows_contiguous(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1] else matrix.contiguous()


@cache
def _has_tma(device: torch.device) -> bool:
    return INTERPRETED.value or torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def _multiprocessors(device: torch.device) -> int:
    if INTERPRETED.value:
        return INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
