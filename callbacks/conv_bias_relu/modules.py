"""What takes a convolution's place in a model: the same parameters under the same names, with another forward."""

from typing import Any, TypeVar

from torch import Tensor, nn

from fasttrain.callbacks.conv_bias_relu.conv import conv_bias, conv_bias_relu
from fasttrain.callbacks.conv_bias_relu.geometry import Geometry, Pair
from fasttrain.callbacks.conv_bias_relu.tiers import Tier

C = TypeVar("C", bound=nn.Conv2d)


class ConvBiasReLU(nn.Conv2d):
    """A Conv2d with bias and the ReLU behind it; made by `fused_from`."""

    _geometry: Geometry
    _tier: Tier

    def forward(self, input: Tensor) -> Tensor:
        """Return relu(conv(input))."""
        assert self.bias is not None
        return conv_bias_relu(input, self.weight, self.bias, *self._geometry, tier=self._tier)


class ConvBias(nn.Conv2d):
    """A Conv2d with bias that no ReLU follows; made by `fused_from`."""

    _geometry: Geometry
    _tier: Tier

    def forward(self, input: Tensor) -> Tensor:
        """Return conv(input)."""
        assert self.bias is not None
        return conv_bias(input, self.weight, self.bias, *self._geometry, tier=self._tier)


def fused_from(conv: nn.Conv2d, kind: type[C], tier: Tier = "auto") -> C:
    """Return a module of the class `kind` with the same parameters, hooks and attributes as a convolution.

    The dictionaries that hold them are shared, so that moving one module to a device moves the other.
    """
    new: Any = kind.__new__(kind)
    vars(new).update(vars(conv))
    new._geometry, new._tier = geometry_of(conv), tier
    return new  # type: ignore[no-any-return]


def geometry_of(conv: nn.Conv2d) -> Geometry | None:
    """Return a convolution's geometry; None for padding='same' that is more on one side than on the other."""
    if not isinstance(conv.padding, str):
        return Geometry.of(_pair(conv.stride), _pair(conv.padding), _pair(conv.dilation), conv.groups)
    padding = (0, 0)
    if conv.padding == "same":
        vertical, horizontal = (d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True))
        if vertical % 2 or horizontal % 2:
            return None
        padding = (vertical // 2, horizontal // 2)
    return Geometry.of(_pair(conv.stride), padding, _pair(conv.dilation), conv.groups)


def _pair(values: tuple[int, ...]) -> Pair:
    return values[0], values[1]
