"""The body: convolution with bias, and with the ReLU behind it, forward and backward. Works in any loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fasttrain.callbacks.conv_bias_relu import in_apex, in_torch
from fasttrain.callbacks.conv_bias_relu.geometry import Geometry, Pair
from fasttrain.callbacks.conv_bias_relu.tiers import Tier, autocast_dtype, tier_for
from fasttrain.errors import OptimizationError

if TYPE_CHECKING:
    from jaxtyping import Float

    from fasttrain.callbacks.conv_bias_relu.eager import Engine


def conv_bias_relu(
    x: Float[Tensor, "N C H W"], weight: Float[Tensor, "O I h w"], bias: Float[Tensor, " O"], stride: Pair = 1,
    padding: Pair = 0, dilation: Pair = 1, groups: int = 1, tier: Tier = "auto",
) -> Float[Tensor, "N O H2 W2"]:  # fmt: skip
    """Return relu(conv2d(x, weight) + bias), channels_last if the fused form was taken.

    Under autocast it computes in autocast's dtype, as conv2d does, and the weight is cast once for all its uses.

    Args:
        x: input; float16, bfloat16 and float32 in channels_last on an NVIDIA GPU are what the fused form is made for.
        weight: I is C / groups; its gradient, and that of the bias, come in its own dtype.
        bias: summed up in float32 in the backward, whatever the dtype of x.
        stride, padding, dilation, groups: as of torch.nn.functional.conv2d; padding is zeros, and in numbers.
        tier: "auto" chooses, see `tiers.Tier` for what else can be asked for.

    Raises:
        OptimizationError: the bias has not one value for each output channel, or the tier asked for can't take these;
            in the backward of the fused form, if it is to be differentiated again.
    """
    return _fused(x, weight, bias, Geometry.of(stride, padding, dilation, groups), relu=True, tier=tier)


def conv_bias(
    x: Float[Tensor, "N C H W"], weight: Float[Tensor, "O I h w"], bias: Float[Tensor, " O"], stride: Pair = 1,
    padding: Pair = 0, dilation: Pair = 1, groups: int = 1, tier: Tier = "auto",
) -> Float[Tensor, "N O H2 W2"]:  # fmt: skip
    """Return conv2d(x, weight) + bias. See `conv_bias_relu`."""
    return _fused(x, weight, bias, Geometry.of(stride, padding, dilation, groups), relu=False, tier=tier)


def _fused(x: Tensor, weight: Tensor, bias: Tensor, geometry: Geometry, relu: bool, tier: Tier) -> Tensor:
    if torch.compiler.is_compiling():
        return in_torch.conv_bias(x, weight, bias, geometry, relu)
    if bias.shape != weight.shape[:1]:
        raise OptimizationError(
            f"conv_bias_relu: the bias has one value for each output channel, {weight.shape[0]} by the weight of shape "
            f"{tuple(weight.shape)}; this one has shape {tuple(bias.shape)}."
        )
    dtype = _computed_in(x)
    chosen = tier_for(tier, x, weight, dtype, geometry, relu)
    if chosen == "torch":
        return in_torch.conv_bias(x, weight, bias, geometry, relu)
    from fasttrain.callbacks.conv_bias_relu.eager import ConvBias

    last = torch.channels_last
    x = x.to(dtype).contiguous(memory_format=last)
    weight = _cast_once(weight, dtype).contiguous(memory_format=last)
    # The gradient goes past the rounded one, in float32, and is added up over a shared head's levels in float32.
    cast_bias = _cast_once(bias, dtype)
    if chosen == "apex":
        return in_apex.conv_bias_relu(x, weight, cast_bias, geometry.padding[0], geometry.stride[0])
    rounded_bias = cast_bias.detach()
    engine = _engine(chosen)
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in (x, weight, bias)):
        return engine(x, weight, bias, rounded_bias, geometry, relu)
    backward_tier = "auto" if x.is_cuda else "triton"
    y: Tensor = ConvBias.apply(x, weight, bias, rounded_bias, geometry, relu, engine, backward_tier)
    return y


def _engine(tier: Tier) -> Engine:
    from fasttrain.callbacks.conv_bias_relu import in_cudnn, in_cudnn_graph, in_triton  # without Triton they can't be

    engines: dict[Tier, Engine] = {"cudnn": in_cudnn.forward, "cudnn_graph": in_cudnn_graph.forward}
    return engines.get(tier, in_triton.forward)


def _computed_in(x: Tensor) -> torch.dtype:
    dtype = autocast_dtype(x.device.type)
    return x.dtype if dtype is None or not x.is_floating_point() or x.dtype == torch.float64 else dtype


def _cast_once(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a parameter in autocast's dtype, from autocast's own cache: one cast for all uses in a forward pass.

    A head that is shared by five levels would otherwise be cast five times, and its gradients cast back five times.
    einsum is the operator under autocast that hands out what it was given, once cast, and does nothing else.
    """
    if parameter.dtype == dtype:
        return parameter
    letters = "oihw"[: parameter.dim()]
    cast: Tensor = torch.einsum(f"{letters}->{letters}", parameter)
    return cast.to(dtype)  # itself, but on devices for which autocast leaves einsum alone
