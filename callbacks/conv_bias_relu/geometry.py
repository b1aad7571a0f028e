"""How a convolution goes over its input, in numbers alone."""

from math import prod
from typing import NamedTuple

from torch import Tensor

from fasttrain.errors import OptimizationError

Pair = int | tuple[int, int]


class Geometry(NamedTuple):
    """Of a 2-D convolution with zeros around its input; pairs are vertical, horizontal."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    @classmethod
    def of(cls, stride: Pair, padding: Pair, dilation: Pair, groups: int) -> "Geometry":
        """Return it from what torch.nn.functional.conv2d takes.

        Raises:
            OptimizationError: something is neither an integer nor two of them.
        """
        pairs = []
        for name, value in (("stride", stride), ("padding", padding), ("dilation", dilation)):
            pair = (value, value) if isinstance(value, int) else tuple(value)
            if isinstance(value, str) or len(pair) != 2:
                raise OptimizationError(
                    f"conv_bias_relu: {name} is an integer or two of them, vertical and horizontal; this is {value!r}."
                )
            pairs.append((pair[0], pair[1]))
        return cls(pairs[0], pairs[1], pairs[2], groups)

    def output_shape(self, x: Tensor, weight: Tensor) -> tuple[int, int, int, int]:
        """Return the shape of the output for an input (N, C, H, W)."""
        sides = []
        for i in (0, 1):
            reach = self.dilation[i] * (weight.shape[2 + i] - 1) + 1
            sides.append(max(0, (x.shape[2 + i] + 2 * self.padding[i] - reach) // self.stride[i] + 1))
        return x.shape[0], weight.shape[0], sides[0], sides[1]

    def output_elements(self, x: Tensor, weight: Tensor) -> int:
        """Return the size of the output, in elements, for an input (N, C, H, W)."""
        return prod(self.output_shape(x, weight))
