"""How a product is laid over the card: its tiles, the programs that take them, and how memory is reached."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fasttrain.callbacks.gemm_gelu.gelu_kernel import INTERPRETED

# A tensor descriptor's addresses and strides are multiples of this.
TMA_BYTES = 16
INTERPRETED_MULTIPROCESSORS = 3


@dataclass(frozen=True)
class Tiling:
    """How much a program takes at once, and how many there are."""

    rows: int = 128
    """Of a tile of the result, a multiple of 16."""
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
    """Rows of tiles that are gone through column by column. 0: a program's tiles have the same columns."""
    programs: int = 2
    """On each multiprocessor, which take tiles in turn; 0 for a program of its own for each tile."""
    flatten: bool = False
    """The first loads for a program's next tile begin before it is through with the last."""
    stagger_ns: int = 0
    """By which a multiprocessor's second program starts later than its first."""


@dataclass(frozen=True)
class PassTiling:
    """How much a program of the pass takes."""

    elements: int = 2048
    """Of a program: with 128 threads, 16 for each, which are two loads of 16 bytes."""
    warps: int = 4
    """Of a program."""


# Where there are no tensor descriptors: products of 16 KiB, so that they also fit into 100 KiB of shared memory.
BY_POINTERS = Tiling(depth=32, warps=8, parts=1, programs=0)
# Tiles for each multiprocessor from which on a late start is worth its while.
STAGGERED_FROM = 8


class Launch:
    """What is the same for both products: the tiling, the programs, and how memory is reached.

    Args:
        matrices: the four that a kernel reads and writes.
        rows: of the result.
        columns: of the result.
        tiling: to use, None for the default.
        default: the one where there are tensor descriptors.
    """

    def __init__(
        self, matrices: tuple[Tensor, ...], rows: int, columns: int, tiling: Tiling | None, default: Tiling
    ) -> None:
        self.matrices = matrices
        device = matrices[0].device
        self.by_descriptors = _has_tma(device) and all(map(_can_be_described, matrices))
        self.tiling = tiling or (default if self.by_descriptors else BY_POINTERS)
        self.multiprocessors = _multiprocessors(device)
        tiles_m, tiles_n = -(-rows // self.tiling.rows), -(-columns // self.tiling.columns)
        tiles = tiles_m * tiles_n
        most = self.tiling.programs * self.multiprocessors
        self.programs = min(tiles, most) if most else tiles
        self.summed_apart = tiles_m
        if not self.tiling.group:
            self.summed_apart = programs_of_a_column(tiles_m, tiles_n, most) if most else tiles_m
            self.programs = self.summed_apart * tiles_n
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


@cache
def programs_of_a_column(tiles_m: int, tiles_n: int, most: int) -> int:
    """Return how many programs share a column of tiles_m tiles, so that all tiles_n columns are done the soonest.

    `most` programs run at a time. Among equals it is the smallest number, for it has the fewest sums.
    """
    return min(range(1, tiles_m + 1), key=lambda count: -(-count * tiles_n // most) * -(-tiles_m // count))


def _can_be_described(matrix: Tensor) -> bool:
    stride_bytes = matrix.stride(0) * matrix.element_size()
    return matrix.data_ptr() % TMA_BYTES == 0 and stride_bytes % TMA_BYTES == 0 and matrix.numel() > 0


@cache
def _has_tma(device: torch.device) -> bool:
    return INTERPRETED.value or torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def _multiprocessors(device: torch.device) -> int:
    if INTERPRETED.value:
        return INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
