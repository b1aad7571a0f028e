"""How the kernels are laid out. What measured best is the default."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Tile:
    """How much a program takes, and turns over in its loop."""

    queries: int = 64
    keys: int = 64
    warps: int = 4
    stages: int = 2
    """Tiles of the loop that are on their way."""
    registers: int | None = None
    """Of a thread at most, so that more programs go on at once: a multiprocessor has 65,536."""


@dataclass(frozen=True)
class Tiling:
    """Of the three kernels."""

    forward: Tile = Tile(queries=128, warps=8, registers=128)
    by_query: Tile = Tile(queries=128, warps=8, registers=128)
    """Of the backward's kernel by queries."""
    by_key: Tile = Tile(registers=168)
    """Of its kernel by keys."""


TILING = Tiling()


class Way(NamedTuple):
    """What a call is given beside tensors."""

    dropout: float
    causal: bool
    scale: float
    tiling: Tiling
