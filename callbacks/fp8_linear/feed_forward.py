"""The body of a feed-forward block, Linear, GELU, Linear: GELU and its gradient are inside of the casts.

GELU's result is only ever written in FP8, and so is the gradient of what went into GELU; the latter is kept in 16 bits.
"""

from typing import Any

import torch
from torch import Tensor

from fasttrain.callbacks.fp8_linear.cast import Approximate, Request
from fasttrain.callbacks.fp8_linear.linear import (
    E4M3,
    Way,
    keep,
    kept,
    no_second_derivative,
    rows,
    turned,
    weight_gradient,
)
from fasttrain.callbacks.fp8_linear.products import product

INPUT, WEIGHT, HIDDEN, WEIGHT_2, GRADIENT, GRADIENT_BEFORE = range(6)
TENSORS = 6


class FeedForwardInFP8(torch.autograd.Function):
    """linear(gelu(linear(x))); arguments of `apply`:

    way: see `Way`. x: (tokens, in). weight: (hidden, in). bias: (hidden,) or None. weight_2: (out, hidden). bias_2:
    (out,) or None. approximate: GELU's form.
    """

    @staticmethod
    def forward(
        ctx: Any, way: Way, x: Tensor, weight: Tensor, bias: Tensor | None, weight_2: Tensor, bias_2: Tensor | None,
        approximate: Approximate,
    ) -> Tensor:  # fmt: skip
        """Return (tokens, out)."""
        _, wants_x, wants_w, wants_b, wants_w_2, _, _ = ctx.needs_input_grad
        goes_on = wants_x or wants_w or wants_b
        of_x = way.backend(Request([x], way.scales, INPUT, E4M3, turned=wants_w))
        of_w = way.backend(Request([weight], way.scales, WEIGHT, E4M3, turned=wants_x))
        before = product(rows(of_x), rows(of_w), of_x, of_w, way.dtype, _cast_bias(bias, way.dtype))
        of_h = way.backend(Request([before], way.scales, HIDDEN, E4M3, turned=wants_w_2, gelu=approximate))
        of_w_2 = way.backend(Request([weight_2], way.scales, WEIGHT_2, E4M3, turned=goes_on))
        y = product(rows(of_h), rows(of_w_2), of_h, of_w_2, way.dtype, _cast_bias(bias_2, way.dtype))
        keep(ctx, [of_x, of_w, of_h, of_w_2], before if goes_on else before.new_empty(0))
        ctx.way, ctx.approximate, ctx.x_dtype = way, approximate, x.dtype
        ctx.dtypes = [None if p is None else p.dtype for p in (weight, bias, weight_2, bias_2)]
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return the gradients that are wanted, in their tensors' dtypes."""
        no_second_derivative()
        way: Way = ctx.way
        before, *_ = ctx.saved_tensors
        of_x, of_w, of_h, of_w_2 = kept(ctx, others=1)
        _, wants_x, wants_w, wants_b, wants_w_2, wants_b_2, _ = ctx.needs_input_grad
        goes_on = wants_x or wants_w or wants_b
        dtype, dtypes = way.scales.scaling.gradient_dtype, ctx.dtypes
        of_dy = way.backend(Request(gradients, way.scales, GRADIENT, dtype, 1, goes_on, wants_w_2, wants_b_2))
        d_bias_2 = of_dy.sums.to(dtypes[3]) if of_dy.sums is not None else None
        dx = d_weight = d_bias = d_weight_2 = None
        if wants_w_2:
            d_weight_2 = weight_gradient(of_dy, of_h, dtypes[2])
        if goes_on:
            d_hidden = product(rows(of_dy), turned(of_w_2), of_dy, of_w_2, way.dtype)
            request = Request(
                [d_hidden], way.scales, GRADIENT_BEFORE, dtype, 1, wants_x, wants_w, wants_b, ctx.approximate, before
            )
            of_dp = way.backend(request)
            d_bias = of_dp.sums.to(dtypes[1]) if of_dp.sums is not None else None
            d_weight = weight_gradient(of_dp, of_x, dtypes[0]) if wants_w else None
            dx = product(rows(of_dp), turned(of_w), of_dp, of_w, way.dtype).to(ctx.x_dtype) if wants_x else None
        return None, dx, d_weight, d_bias, d_weight_2, d_bias_2, None


def _cast_bias(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(dtype)
