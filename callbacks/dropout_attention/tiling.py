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


@dataclass(frozen=True)
class Tiling:
    """Of the three kernels."""

    forward: Tile = Tile()
    by_query: Tile = Tile()
    """Of the backward's kernel by queries."""
    by_key: Tile = Tile()
    """Of its kernel by keys."""


TILING = Tiling()


class Way(NamedTuple):
    """What a call is given beside tensors."""

    dropout: float
    causal: bool
    scale: float
    tiling: Tiling
