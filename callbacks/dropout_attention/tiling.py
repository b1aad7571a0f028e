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
    """Of a thread at most, so that more programs go on at once: a multiprocessor has 65,536. For 16 bits and heads of
    up to 64; others need them all."""


@dataclass(frozen=True)
class Tiling:
    """Of the three kernels.

    The defaults were the fastest of five or six each on an H200, for heads of 64 in bfloat16: small tiles, four
    programs at once on a multiprocessor, so that products of one go on beside the exponentials of another.
    """

    forward: Tile = Tile(registers=128)
    by_query: Tile = Tile(registers=128)
    """Of the backward's kernel by queries."""
    by_key: Tile = Tile(queries=32, registers=128)
    """Of its kernel by keys."""


TILING = Tiling()


class Way(NamedTuple):
    """What a call is given beside tensors."""

    dropout: float
    causal: bool
    scale: float
    tiling: Tiling
