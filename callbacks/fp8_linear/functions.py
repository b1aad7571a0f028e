"""The functions for any loop: linear layers and a feed-forward block in FP8, or plain where FP8 can't be."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

from fasttrain.callbacks.fp8_linear.backend import Tier, backend_for
from fasttrain.callbacks.fp8_linear.cast import Approximate
from fasttrain.callbacks.fp8_linear.feed_forward import FeedForwardInFP8
from fasttrain.callbacks.fp8_linear.linear import LinearInFP8, Way
from fasttrain.callbacks.fp8_linear.scaling import Scales


def fp8_linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], scales: Scales, tier: Tier = "auto"
) -> tuple[Tensor, ...]:
    """Return x @ weight.T + bias of each layer, (..., out), in x's dtype, or autocast's where that is on.

    Args:
        x: (..., in).
        weights: (out, in) of each layer.
        biases: (out,) of each, or None.
        scales: of three tensors: input, weights, gradient; brought up to date.
        tier: see `backend_for`.

    Raises:
        OptimizationError: in the backward, if it is to be differentiated again.
    """
    dtype = dtype_of_products(x)
    tokens = x.reshape(-1, x.shape[-1])
    backend = backend_for(tier, tokens, dtype, [x.shape[-1], *(len(weight) for weight in weights)])
    if backend is None:
        if len(weights) == 1:
            return (linear(x, weights[0], biases[0]),)
        return tuple(linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    found = LinearInFP8.apply(Way(scales, backend, dtype), tokens, *weights, *biases)
    return tuple(y.view(*x.shape[:-1], y.shape[1]) for y in found)


def fp8_feed_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, weight_2: Tensor, bias_2: Tensor | None, scales: Scales,
    approximate: Approximate = "none", tier: Tier = "auto",
) -> Tensor:  # fmt: skip
    """Return gelu(x @ weight.T + bias) @ weight_2.T + bias_2, in x's dtype, or autocast's where that is on.

    Args:
        x: (..., in).
        weight: (hidden, in), and its bias (hidden,).
        weight_2: (out, hidden), and its bias (out,).
        scales: of six tensors, see `feed_forward`; brought up to date.
        approximate: GELU's form, as torch names it.
        tier: see `backend_for`.

    Raises:
        OptimizationError: in the backward, if it is to be differentiated again.
    """
    dtype = dtype_of_products(x)
    tokens = x.reshape(-1, x.shape[-1])
    backend = backend_for(tier, tokens, dtype, [*weight.shape, len(weight_2)])
    if backend is None:
        return linear(gelu(linear(x, weight, bias), approximate=approximate), weight_2, bias_2)
    y: Tensor = FeedForwardInFP8.apply(
        Way(scales, backend, dtype), tokens, weight, bias, weight_2, bias_2, approximate
    )  # fmt: skip
    return y.view(*x.shape[:-1], y.shape[1])


def dtype_of_products(x: Tensor) -> torch.dtype:
    """Return autocast's dtype where that is on, else x's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
