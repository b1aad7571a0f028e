"""The tier for everything else: the same formula in PyTorch's operators. torch.compile makes a few kernels of it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fasttrain.callbacks.layer_norm_dropout.mask import keep_mask


def dropout_add_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, x_bias: Tensor | None, p: float,
    eps: float, seed: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return layer_norm(residual + dropout(x + x_bias)) in `dtype`, computed in float32 or more.

    Without a seed the mask is F.dropout's.
    """
    wide = torch.promote_types(torch.float32, torch.promote_types(x.dtype, dtype))
    value = x.to(wide)
    if x_bias is not None:
        value = value + x_bias
    if seed is not None and p > 0:
        scaled = value / (1 - p) if p < 1 else value
        value = torch.where(keep_mask(seed, x.shape, p), scaled, 0)
    else:
        value = F.dropout(value, p)
    if residual is not None:
        value = residual.to(wide) + value
    weight, bias = (None if parameter is None else parameter.to(wide) for parameter in (weight, bias))
    return F.layer_norm(value, x.shape[-1:], weight, bias, eps).to(dtype)
