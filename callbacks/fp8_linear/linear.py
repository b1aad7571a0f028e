"""The body: linear layers whose three products are of FP8 matrices, several layers of one input together. For autograd.

    y  = x W^T    rows of x and of W
    dx = dy W     rows of dy, and W transposed
    dW = dy^T x   dy and x transposed

x, W and dy are each cast once, both ways at the same time; the bias gradient is a by-product of dy's cast.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttrain.callbacks.fp8_linear.backend import Backend
from fasttrain.callbacks.fp8_linear.cast import Cast, Request
from fasttrain.callbacks.fp8_linear.products import product
from fasttrain.callbacks.fp8_linear.scaling import Scales
from fasttrain.errors import OptimizationError

INPUT, WEIGHT, GRADIENT = range(3)
TENSORS = 3
E4M3 = torch.float8_e4m3fn


class Way(NamedTuple):
    """What a function needs beside tensors with gradients."""

    scales: Scales
    backend: Backend
    dtype: torch.dtype
    """Of results and of the gradient by the input."""


class LinearInFP8(torch.autograd.Function):
    """Layers of one input; arguments of `apply`:

    way: see `Way`. x: (tokens, in), with a unit stride along rows. parameters: the weights, (out, in) each, then
    as many biases, (out,) each or None.
    """

    @staticmethod
    def forward(ctx: Any, way: Way, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        """Return (tokens, out) for each layer; they are views of one matrix."""
        count = len(parameters) // 2
        weights, biases = [w for w in parameters[:count] if w is not None], parameters[count:]
        wants = ctx.needs_input_grad
        sizes = [len(weight) for weight in weights]
        of_x = way.backend(Request([x], way.scales, INPUT, E4M3, turned=any(wants[2 : 2 + count])))
        of_w = way.backend(Request(weights, way.scales, WEIGHT, E4M3, turned=wants[1]))
        y = product(rows(of_x), rows(of_w), of_x, of_w, way.dtype, joined_biases(biases, sizes, way.dtype))
        keep(ctx, [of_x, of_w])
        ctx.way, ctx.sizes, ctx.x_dtype = way, sizes, x.dtype
        ctx.dtypes = [None if parameter is None else parameter.dtype for parameter in parameters]
        ctx.set_materialize_grads(True)
        return y.split(sizes, dim=1) if count > 1 else (y,)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return the gradients that are wanted, in their tensors' dtypes."""
        no_second_derivative()
        way: Way = ctx.way
        of_x, of_w = kept(ctx)
        _, wants_x, *wants = ctx.needs_input_grad
        count = len(ctx.sizes)
        by_weight, by_bias = any(wants[:count]), any(wants[count:])
        dtype = way.scales.scaling.gradient_dtype
        of_dy = way.backend(Request(gradients, way.scales, GRADIENT, dtype, 1, wants_x, by_weight, by_bias))
        dx = product(rows(of_dy), turned(of_w), of_dy, of_w, way.dtype).to(ctx.x_dtype) if wants_x else None
        found: list[Tensor | None] = [None] * len(wants)
        if by_weight:
            d_weight = weight_gradient(of_dy, of_x, ctx.dtypes[0])
            found[:count] = d_weight.split(ctx.sizes)
        if by_bias:
            assert of_dy.sums is not None
            found[count:] = of_dy.sums.split(ctx.sizes)
        return None, dx, *_in_dtypes(found, wants, ctx.dtypes)


def weight_gradient(of_dy: Cast, of_x: Cast, dtype: torch.dtype) -> Tensor:
    """Return dy^T x in a weight's dtype: straight in float32 where that is it."""
    # The sum goes over all tokens; the tensor cores' own registers are too short for it.
    return product(turned(of_dy), turned(of_x), of_dy, of_x, dtype, fast=False)


def joined_biases(biases: Sequence[Tensor | None], sizes: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    """Return several biases as one, zeros for those that are not there; None if none is."""
    first = next((bias for bias in biases if bias is not None), None)
    if first is None:
        return None
    if len(biases) == 1:
        return first.to(dtype)
    return torch.cat([first.new_zeros(n) if b is None else b for b, n in zip(biases, sizes, strict=True)]).to(dtype)


def rows(cast: Cast) -> Tensor:
    """Return the rows of a cast that has them."""
    assert cast.rows is not None
    return cast.rows


def turned(cast: Cast) -> Tensor:
    """Return the transposed rows of a cast that has them."""
    assert cast.turned is not None
    return cast.turned


def keep(ctx: Any, casts: Sequence[Cast], *others: Tensor) -> None:
    """Keep the transposed rows of casts for the backward, and other tensors."""
    ctx.save_for_backward(*others, *(part for cast in casts for part in (cast.turned, cast.inverse)))


def kept(ctx: Any, others: int = 0) -> list[Cast]:
    """Return the casts that were kept, behind some other tensors."""
    tensors = ctx.saved_tensors[others:]
    return [Cast(None, tensors[at], tensors[at + 1]) for at in range(0, len(tensors), 2)]


def no_second_derivative() -> None:
    """Raise where a gradient is to be differentiated again."""
    if torch.is_grad_enabled():
        raise OptimizationError(
            "fp8_linear: a gradient that can be differentiated again was asked for (create_graph=True), and "
            "products in FP8 have no second derivative; leave this layer out by fp8_linear's `leave`."
        )


def _in_dtypes(
    found: Sequence[Tensor | None], wants: Sequence[bool], dtypes: Sequence[torch.dtype | None]
) -> list[Tensor | None]:
    return [
        gradient.to(dtype) if wanted and gradient is not None and dtype is not None else None
        for gradient, wanted, dtype in zip(found, wants, dtypes, strict=True)
    ]
