"""The tier for everything else: the same in PyTorch's operators, which torch.compile makes kernels of."""

import torch
from torch import Tensor


def relu_bias_backward(g: Tensor, y: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """Return g where y > 0 (0 elsewhere; None without y), and its column sums, summed in float32 or more."""
    masked = None if y is None else torch.where(y <= 0, torch.zeros_like(g), g)
    return masked, (g if masked is None else masked).sum(0, dtype=torch.promote_types(g.dtype, torch.float32))
