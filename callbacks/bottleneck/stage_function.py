"""A stage of bottleneck blocks as one function for autograd: forward, and the backward through all of its blocks.

For one block, with w the scaled weights, b the biases and p(.) what lets pass where a ReLU did:

    h1 = relu(w1 x + b1)      h2 = relu(w2 * h1 + b2)      y = relu(w3 h2 + b3 + shortcut)

    g2 = p_h2(w3' g)          g1 = p_h1(w2 *' g2)          dx = p_x(w1' g1 + g through the shortcut)

g, the gradient at y's ReLU, has passed that ReLU already. As x is the last block's y, dx is the last block's g, so that
nothing is done between blocks. Only the gradient that comes in at the stage's end has a pass to itself.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fasttrain.callbacks.bottleneck.constants import Constant
from fasttrain.callbacks.bottleneck.convolution import convolution, data_gradient, projection
from fasttrain.callbacks.bottleneck.operators import Geometry, Operators
from fasttrain.callbacks.bottleneck.scaled_weights import ScaledWeights
from fasttrain.callbacks.bottleneck.weight_gradients import Layout, WeightGradients
from fasttrain.errors import OptimizationError

T = TypeVar("T")


class Block(NamedTuple):
    """One bottleneck block without its tensors."""

    spatial: Geometry
    """Of the convolution in the middle."""
    step: int | None
    """The stride of the downsample path's convolution; None for a block without."""

    @property
    def convolutions(self) -> int:
        """How many weights it has."""
        return 3 if self.step is None else 4


class Call(NamedTuple):
    """How one stage is to be computed, this time."""

    operators: Operators
    blocks: tuple[Block, ...]
    constants: tuple[Constant, ...]
    """Of each convolution, block by block, the downsample path's last."""
    side_streams: int
    keep: bool
    """Whether a backward will follow."""

    def by_block(self, values: Sequence[T]) -> list[Sequence[T]]:
        """Return what is one for each convolution as what is some for each block."""
        ends = list(accumulate(block.convolutions for block in self.blocks))
        return [values[start:end] for start, end in pairwise([0, *ends])]


class Kept(NamedTuple):
    """What the backward needs of a block. Its gates are its maps, of which x is the last block's y."""

    x: Tensor
    h1: Tensor
    h2: Tensor
    weights: tuple[Tensor, ...]
    """Scaled, and in the dtype of the maps."""


def run(call: Call, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, list[Kept]]:
    """Return the stage's output, and what the backward needs of each block.

    Args:
        call: how.
        x: (N, C, H, W), channels_last.
        weights: of each convolution, block by block, unscaled.
    """
    kept = []
    constants_of = call.by_block(call.constants)
    scales = [[constant.scale for constant in constants] for constants in constants_of]
    scaled = ScaledWeights(call.operators, call.by_block(weights), scales, x.dtype, call.side_streams)
    for index, (block, constants) in enumerate(zip(call.blocks, constants_of, strict=True)):
        w = scaled[index]
        h1 = convolution(x, w[0], constants[0].rounded, Geometry())
        h2 = convolution(h1, w[1], constants[1].rounded, block.spatial)
        if block.step is None:
            add, bias = x, constants[2].rounded
        else:
            add, bias = projection(x, w[3], block.step), _sum(constants[2], constants[3])
        if call.keep:
            kept.append(Kept(x, h1, h2, w))
        x = convolution(h2, w[2], bias, Geometry(), add)
    return x, kept


def _sum(one: Constant, other: Constant) -> Tensor:
    """Return the sum of two biases, rounded once."""
    return torch.add(one.bias, other.bias, out=torch.empty_like(one.rounded))


class StageFunction(torch.autograd.Function):
    """`run` with a gradient. Returns y twice, in the same memory, so that its two users' gradients are added here."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return y and y; keep the maps and the scaled weights."""
        y, kept = run(call, x, weights)
        ctx.call = call
        ctx.layouts = [(weight.size(), weight.stride(), weight.dtype) for weight in weights]
        tensors = [t for block in kept for t in (*block[:-1], *block.weights)]
        ctx.save_for_backward(y, *tensors, *(constant.scale for constant in call.constants))
        ctx.set_materialize_grads(False)
        return y, y.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """Return the gradients of x and of the weights that want one."""
        if torch.is_grad_enabled():
            raise OptimizationError(
                "bottleneck: a gradient that can be differentiated again was asked for (create_graph=True), and the "
                "fused backward can't be; undo the fusion, or compute by the plain blocks."
            )
        g, *rest = [g.contiguous(memory_format=torch.channels_last) for g in gradients if g is not None] or [None]
        if g is None:
            return (None,) * (2 + len(ctx.layouts))
        call: Call = ctx.call
        y, *saved = ctx.saved_tensors
        kept = []
        for block in call.blocks:
            (x, h1, h2), weights = saved[:3], saved[3 : 3 + block.convolutions]
            del saved[: 3 + block.convolutions]
            kept.append(Kept(x, h1, h2, tuple(weights)))
        # A backward called under autocast, perhaps of another dtype, must not cast what forward has cast already.
        with torch.autocast(g.device.type, enabled=False):
            g = call.operators.gated(g, y, rest[0] if rest else None, in_place=False)
            dx, dw = _backward(call, kept, scales=saved, g=g, layouts=ctx.layouts, wanted=ctx.needs_input_grad[1:])
        return None, dx, *dw


def _backward(
    call: Call, kept: list[Kept], scales: list[Tensor], g: Tensor, layouts: list[Layout], wanted: Sequence[bool]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Return dx and the weights' gradients, those that are wanted: x's, then the weights'. g has passed y's ReLU."""
    operators = call.operators
    gradients = WeightGradients(operators, g.device, call.side_streams)
    dw: list[Tensor | None] = [None] * len(layouts)

    def weight_gradient(number: int, g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> None:
        if wanted[1 + number]:
            dw[number] = gradients.add(g, x, weight, geometry, scales[number], layouts[number])

    first = len(layouts)
    for index in reversed(range(len(kept))):
        block, tensors = call.blocks[index], kept[index]
        x, w = tensors.x, tensors.weights
        first -= block.convolutions
        wants_dx = any(wanted[: 1 + first])
        weight_gradient(first + 2, g, tensors.h2, w[2], Geometry())
        if block.step is not None:
            weight_gradient(first + 3, g, x, w[3], Geometry(stride=(block.step, block.step)))
        if not any(wanted[: first + 3]):
            break
        g2 = operators.pointwise_backward(g, w[2], tensors.h2, None, 1)
        weight_gradient(first + 1, g2, tensors.h1, w[1], block.spatial)
        if not any(wanted[: first + 2]):
            break
        g1 = data_gradient(g2, tensors.h1, w[1], block.spatial)
        g1 = operators.gated(g1, tensors.h1, None, in_place=True)
        weight_gradient(first, g1, x, w[0], Geometry())
        if not wants_dx:
            break
        add = g if block.step is None else operators.pointwise_backward(g, w[3], None, None, 1)
        g = operators.pointwise_backward(g1, w[0], x if index else None, add, block.step or 1)
    gradients.join()
    return (g if wanted[0] else None), dw
