"""The convolution with bias for autograd: its ReLU's gradient and its bias's are taken in one pass.

Kept for the backward are the input and the weight, as for every convolution, and with a ReLU the output, which takes no
memory of its own where the next convolution keeps it as its input.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fasttrain.callbacks.conv_bias_relu.geometry import Geometry
from fasttrain.callbacks.relu_bias_backward import as_rows, column_sums, relu_bias_backward
from fasttrain.callbacks.relu_bias_backward.backward import Tier
from fasttrain.errors import OptimizationError

Engine = Callable[[Tensor, Tensor, Tensor, Tensor, Geometry, bool], Tensor]


class ConvBias(torch.autograd.Function):
    """Arguments of `apply` as of `in_cudnn.forward`, then the engine and the tier of the backward's pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, rounded_bias: Tensor, geometry: Geometry, relu: bool,
        engine: Engine, backward_tier: Tier,
    ) -> Tensor:  # fmt: skip
        """Return the output."""
        y = engine(x, weight, bias, rounded_bias, geometry, relu)
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if wants_weight else None, weight if wants_x else None, y if relu else None)
        ctx.geometry, ctx.tier, ctx.bias_dtype = geometry, backward_tier, bias.dtype
        ctx.shapes = x.shape, weight.shape
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        """Return the gradients of x, weight and bias."""
        if torch.is_grad_enabled():
            raise OptimizationError(
                "conv_bias_relu: a gradient that can be differentiated again was asked for (create_graph=True), and "
                "the fused backward can't be; undo the fusion, or pass tier='torch'."
            )
        x, weight, y = ctx.saved_tensors
        g = g.contiguous(memory_format=torch.channels_last)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dbias: Tensor | None = None
        if y is not None:
            rows, dbias = relu_bias_backward(as_rows(g), as_rows(y), ctx.tier)
            g = rows.view(g.shape[0], *g.shape[2:], g.shape[1]).permute(0, 3, 1, 2)
        elif wants_bias:
            dbias = column_sums(as_rows(g), ctx.tier)
        dx, dweight = _of_convolution(g, x, weight, ctx.shapes, ctx.geometry, (wants_x, wants_weight))
        return dx, dweight, dbias.to(ctx.bias_dtype) if wants_bias and dbias is not None else None, *(None,) * 5


def _of_convolution(
    g: Tensor, x: Tensor | None, weight: Tensor | None, shapes: tuple[torch.Size, torch.Size], geometry: Geometry,
    wanted: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of a convolution's input and weight, of those that are wanted."""
    if not any(wanted):
        return None, None
    # Of a tensor whose values the other gradient takes, only shape and strides are looked at.
    empty = [
        torch.empty(shape, dtype=g.dtype, device=g.device, memory_format=torch.channels_last)
        if kept is None else kept
        for kept, shape in zip((x, weight), shapes, strict=True)
    ]  # fmt: skip
    stride, padding, dilation, groups = geometry
    dx, dweight, _ = torch.ops.aten.convolution_backward(
        g, *empty, None, stride, padding, dilation, False, [0, 0], groups, [*wanted, False]
    )
    return dx, dweight
