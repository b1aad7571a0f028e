"""The module."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fasttrain.callbacks.joined_linear.columns import split_columns


class JoinedLinear(nn.Module):
    """Runs several nn.Linear of its parent, not its own, on one input: attention's projections for instance.

    Their weights, which stay parameters by themselves, are joined in each forward: small beside the input, which is
    read once and not by each.

    Args:
        names: under which the parent has the layers. A room that puts a form of its own here leaves these as they are.
    """

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def forward(self, x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
        """Return (..., out) of each layer; either all have a bias or none."""
        weight = torch.cat(tuple(layer.weight for layer in layers))
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        bias = torch.cat(biases) if biases else None
        return split_columns(linear(x, weight, bias), [layer.out_features for layer in layers])
