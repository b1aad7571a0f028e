"""The loss for autograd.

The gradient is written in the forward, where the logits are at hand, but what autograd will multiply it with (a loss
scale, a weight, one over the steps of an accumulation) is known in the backward only. It is nearly always what it was
at the last step. So the forward multiplies by the factor that the last backward brought, which lies on the device in
`expected`, and the backward compares there: if its factor is that one, nothing is left to do; else the gradients are
computed again. Either way they are the same, bit by bit; and in float16 they are scaled before they are rounded.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fasttrain.callbacks.focal_loss.tiers import Tier, tier_for
from fasttrain.errors import OptimizationError


class OnePass(torch.autograd.Function):
    """The loss of logits. Arguments of `apply`, shapes and dtypes checked:

    targets: int32 or int64 (B, A). foreground: (B,), number of targets >= 0. expected: float32 scalar.
    levels: logits (B, A of this level, K) each, rows contiguous; wholly if in_place.
    """

    @staticmethod
    def forward(
        ctx: Any, targets: Tensor, foreground: Tensor, expected: Tensor, alpha: float, gamma: float, tier: Tier,
        in_place: bool, *levels: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return the loss; keep the gradients."""
        if in_place:
            gradients = [level.detach() for level in levels]
            torch.autograd.graph.increment_version(levels)  # autograd may have saved them for somebody else
        else:
            gradients = empty_gradients(levels)
            ctx.save_for_backward(targets, foreground, *levels)
        loss, used = tier_for(tier, levels[0]).forward(levels, targets, foreground, expected, alpha, gamma, gradients)
        ctx.gradients, ctx.used, ctx.expected = gradients, used, expected
        ctx.alpha, ctx.gamma, ctx.tier, ctx.in_place = alpha, gamma, tier, in_place
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *factors: Any) -> tuple[Any, ...]:
        """Return the gradients, given away: a second backward makes its own."""
        refuse_second_derivative()
        gradients, ctx.gradients = ctx.gradients, None
        used = ctx.used
        if ctx.in_place:
            if gradients is None:
                raise OptimizationError(
                    "focal_loss: a second backward through the same loss (retain_graph=True) needs the logits, and "
                    "with in_place=True the gradients have taken their place; use in_place=False."
                )
            tier_for(ctx.tier, gradients[0]).rescale(gradients, factors[0], used, ctx.expected)
        else:
            targets, foreground, *levels = ctx.saved_tensors
            if gradients is None:
                gradients, used = empty_gradients(levels), torch.full_like(used, torch.nan)
            tier_for(ctx.tier, levels[0]).backward(
                levels, targets, foreground, factors[0], used, ctx.alpha, ctx.gamma, gradients, ctx.expected
            )
        return *(None,) * 7, *gradients


def empty_gradients(levels: Sequence[Tensor]) -> list[Tensor]:
    """Return a contiguous tensor for the gradient of each level."""
    return [torch.empty_like(level, memory_format=torch.contiguous_format) for level in levels]


def refuse_second_derivative() -> None:
    """Raise OptimizationError in a backward that is itself recorded."""
    if torch.is_grad_enabled():
        raise OptimizationError(
            "focal_loss: a gradient that can be differentiated again was asked for (create_graph=True), and this loss "
            "has no second derivative; compute it by fasttrain.callbacks.focal_loss.reference."
        )
