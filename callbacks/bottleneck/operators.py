"""What a tier provides: how gradients go back through a 1x1 convolution, a residual and a ReLU, and weights' scales.

All maps are (N, C, H, W) in channels_last and of one dtype, which the weights have too; those have been scaled by
their normalization already. A gate is the ReLU's own output: a gradient passes where it is positive.
"""

from typing import NamedTuple, Protocol

from torch import Tensor


class Geometry(NamedTuple):
    """How a convolution goes over its map, as nn.Conv2d says it."""

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1


class Operators(Protocol):
    """One tier. Every function returns new memory, unless it says otherwise."""

    def pointwise_backward(
        self, g: Tensor, weight: Tensor, gate: Tensor | None, add: Tensor | None, step: int
    ) -> Tensor:
        """Return gate(g back through a 1x1 convolution of stride 1 [+ add]).

        `add` lies at every step-th pixel, where a convolution of that stride looked: its map is smaller if step > 1.
        """

    def gated(self, g: Tensor, gate: Tensor, other: Tensor | None, in_place: bool) -> Tensor:
        """Return gate(g [+ other]), in g's memory if `in_place`."""

    def scale(self, weight: Tensor, scale: Tensor, out: Tensor) -> None:
        """Write weight * scale by output channel into `out`, both (O, I, H, W), rounded once to its dtype."""
