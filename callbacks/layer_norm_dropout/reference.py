"""The obvious version: add the bias, drop out by a given mask, add the residual, normalize.

The kernels compute in float32 and round their results once. Tolerances are relative to the largest value of the
reference in float64, given the same inputs and the same mask (`mask.keep_mask`). Gradients of weight and biases are
sums over all rows: they have the tolerance of the dtype of activations, and at least their own dtype's.
"""

import torch
from torch import Tensor

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 4e-6,  # sums of up to 8192 terms, by a tree, of which a difference is taken
    torch.float16: 2e-3,  # of the kept normalized value and of the result, 5e-4 each, and twice that in a difference
    torch.bfloat16: 1.6e-2,  # likewise, 4e-3 each
}


def reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x_bias: Tensor | None = None,
    keep: Tensor | None = None,
    p: float = 0.0,
    eps: float = 1e-5,
) -> Tensor:
    """Return layer_norm(residual + keep * (x + x_bias) / (1 - p)) over the last dimension.

    Args:
        x: (..., H).
        weight: (H,), and so are bias and x_bias.
        bias: added at the end.
        residual: as x.
        x_bias: added to x before dropout.
        keep: bool, as x: what the dropout keeps; None drops nothing.
        p: the rate at which it drops.
        eps: added to the variance.
    """
    value = x if x_bias is None else x + x_bias
    if keep is not None:
        value = value * keep / (1 - p)
    if residual is not None:
        value = residual + value
    mean = value.mean(-1, keepdim=True)
    variance = (value - mean).square().mean(-1, keepdim=True)
    normalized = (value - mean) / (variance + eps).sqrt()
    if weight is not None:
        normalized = normalized * weight
    return normalized if bias is None else normalized + bias
