"""The same for torch.compile: operators that it takes as they are. They cost the host some hundred microseconds, which
a compiled graph saves elsewhere; so eager code goes by `eager.OnePass`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from fasttrain.callbacks.focal_loss.eager import empty_gradients, refuse_second_derivative
from fasttrain.callbacks.focal_loss.in_torch import accumulation_dtype
from fasttrain.callbacks.focal_loss.tiers import Tier, tier_for


@custom_op(
    "fasttrain::focal_loss",
    mutates_args=(),
    schema="(Tensor[] levels, Tensor targets, Tensor foreground, Tensor expected, float alpha, float gamma, str tier, "
    "bool with_gradient) -> (Tensor, Tensor, Tensor[])",
)
def focal_loss(
    levels: Sequence[Tensor],
    targets: Tensor,
    foreground: Tensor,
    expected: Tensor,
    alpha: float,
    gamma: float,
    tier: Tier,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the loss, the factor of the gradients, and the gradients: none if not wanted. Arguments as of OnePass."""
    gradients = empty_gradients(levels) if with_gradient else []
    compute = tier_for(tier, levels[0]).forward
    loss, used = compute(levels, targets, foreground, expected, alpha, gamma, gradients if with_gradient else None)
    return loss, used, gradients


@focal_loss.register_fake
def _(
    levels: Sequence[Tensor], targets: Tensor, foreground: Tensor, expected: Tensor, alpha: float, gamma: float,
    tier: Tier, with_gradient: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    loss = levels[0].new_empty((), dtype=accumulation_dtype(levels[0]))
    return loss, torch.empty_like(expected), empty_gradients(levels) if with_gradient else []


@custom_op(
    "fasttrain::focal_loss_backward",
    mutates_args=("gradients", "expected"),
    # Tensors come first: inductor (torch 2.14) mixes up a list of them behind a text.
    schema="(Tensor[] levels, Tensor targets, Tensor foreground, Tensor factor, Tensor used, Tensor(a!)[] gradients, "
    "Tensor(b!) expected, float alpha, float gamma, str tier) -> ()",
)
def focal_loss_backward(
    levels: Sequence[Tensor],
    targets: Tensor,
    foreground: Tensor,
    factor: Tensor,
    used: Tensor,
    gradients: Sequence[Tensor],
    expected: Tensor,
    alpha: float,
    gamma: float,
    tier: Tier,
) -> None:
    """Let `gradients` hold `factor`, whatever factor `used` they hold, and let `expected` be the factor."""
    compute = tier_for(tier, levels[0]).backward
    compute(levels, targets, foreground, factor, used, alpha, gamma, gradients, expected)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    levels, targets, foreground, expected, *options, _ = inputs
    _, used, gradients = output
    ctx.mark_non_differentiable(used, *gradients)
    ctx.set_materialize_grads(False)  # else there are zeros for the gradients' own gradients
    ctx.save_for_backward(targets, foreground, *levels)
    # Not saved likewise, because the backward writes to them, which autograd takes for an accident.
    ctx.gradients, ctx.used, ctx.expected, ctx.options = gradients, used, expected, options


def _backward(ctx: Any, factor: Tensor | None, *_: Any) -> tuple[Any, ...]:
    refuse_second_derivative()
    targets, foreground, *levels = ctx.saved_tensors
    gradients, used, ctx.gradients = ctx.gradients, ctx.used, None
    if not gradients:
        gradients, used = empty_gradients(levels), torch.full_like(used, torch.nan)
    focal_loss_backward(levels, targets, foreground, factor, used, gradients, ctx.expected, *ctx.options)
    return gradients, *(None,) * 7


focal_loss.register_autograd(_backward, setup_context=_setup_context)
