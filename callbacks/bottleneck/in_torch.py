"""The tier for everything else: PyTorch's operators."""

import torch
from torch import Tensor

from fasttrain.callbacks.bottleneck.convolution import projection_gradient


def pointwise_backward(g: Tensor, weight: Tensor, gate: Tensor | None, add: Tensor | None, step: int) -> Tensor:
    """See `Operators`."""
    dx = projection_gradient(g, weight)
    if add is not None:
        dx[..., ::step, ::step] += add
    return dx if gate is None else gated(dx, gate, None, in_place=True)


def gated(g: Tensor, gate: Tensor, other: Tensor | None, in_place: bool) -> Tensor:
    """See `Operators`."""
    if other is not None:
        g, in_place = g + other, True
    stopped = gate <= 0
    return g.masked_fill_(stopped, 0) if in_place else g.masked_fill(stopped, 0)


def scale(weight: Tensor, scale: Tensor, out: Tensor) -> None:
    """See `Operators`."""
    torch.mul(weight, scale.view(-1, 1, 1, 1), out=out)
