"""What a cast is asked for and what it gives, whoever does it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fasttrain.callbacks.fp8_linear.scaling import Scales

Approximate = Literal["none", "tanh"]


@dataclass(frozen=True)
class Cast:
    """A matrix in FP8: `inverse * rows` is about what was cast."""

    rows: Tensor | None
    """(rows, columns)."""
    turned: Tensor | None
    """(columns, rows), contiguous."""
    inverse: Tensor
    """float32 (), by which values are multiplied."""
    sums: Tensor | None = None
    """float32 (columns,), of the values before rounding."""


@dataclass(frozen=True)
class Request:
    """A matrix to cast.

    Several parts are one matrix, side by side in dimension `along`, with one scale.
    """

    parts: Sequence[Tensor]
    scales: Scales
    index: int
    """Of the tensor's scale."""
    dtype: torch.dtype
    along: int = 0
    rows: bool = True
    turned: bool = True
    sums: bool = False
    gelu: Approximate | None = None
    """Cast gelu(part), or with `before` part * gelu'(before)."""
    before: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Of the whole matrix."""
        rows, columns = self.parts[0].shape
        total = sum(part.shape[self.along] for part in self.parts)
        return (total, columns) if self.along == 0 else (rows, total)
