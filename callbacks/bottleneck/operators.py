"""What a stage is made of, and what a tier must provide for it.

All maps are (N, C, H, W) in channels_last and of one dtype, which the weights have too; those have been scaled by
their normalization already. Biases are float32, or float64 for float64 maps, and of the maps' dtype for `spatial`.
"""

from typing import NamedTuple, Protocol

from torch import Tensor


class Geometry(NamedTuple):
    """How a convolution goes over its map, as nn.Conv2d says it."""

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1


class Shortcut(NamedTuple):
    """A downsample path: a 1x1 convolution of the block's input."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    step: int
    """Its stride, in both directions."""


class Operators(Protocol):
    """One tier. Every function returns new memory, unless it says otherwise."""

    def pointwise(
        self, x: Tensor, weight: Tensor, bias: Tensor, add: Tensor | None, shortcut: Shortcut | None, keep_gate: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return y = relu(conv1x1(x) + bias [+ add | + shortcut]), and what tells where y passed, for `gate`s below."""

    def spatial(self, x: Tensor, weight: Tensor, bias: Tensor, geometry: Geometry) -> Tensor:
        """Return relu(conv(x) + bias), which is its own gate."""

    def pointwise_backward(
        self, g: Tensor, weight: Tensor, gate: Tensor | None, add: Tensor | None, step: int
    ) -> Tensor:
        """Return gate(g back through a 1x1 convolution of stride 1 [+ add]).

        `add` lies at every step-th pixel, where a convolution of that stride looked: its map is smaller if step > 1.
        """

    def spatial_backward(self, g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
        """Return the gradient of a convolution's input x, whose shape alone counts."""

    def gated(self, g: Tensor, gate: Tensor, other: Tensor | None, in_place: bool) -> Tensor:
        """Return gate(g [+ other]), in g's memory if `in_place`."""
