"""The obvious version: batch normalization (Ioffe and Szegedy, arXiv 1502.03167), an addition, a ReLU.

The fused kernels compute in float32 and round once, at the end. Tolerances of maps are relative to the largest value
of the reference in float64, given the same rounded inputs; those of sums by channel, statistics and the gradients of
weight and bias, are `SUM_TOLERANCE` of the largest, whatever the dtype of the maps, because all sums are float32. An
element whose value is within rounding of zero may pass the ReLU on one side and not on the other: gradients are
compared where the reference is not that near to zero.
"""

import torch
from torch import Tensor

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,  # roundings of 6e-8, of terms that may be some ten times their sum
    torch.float16: 1e-3,  # one rounding of 5e-4
    torch.bfloat16: 8e-3,  # one rounding of 4e-3
}
SUM_TOLERANCE = 1e-5


def reference(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, z: Tensor | None = None,
    z_weight: Tensor | None = None, z_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return relu(norm(x) [+ z | + norm(z)]), all of (N, C, H, W), in the dtype of the arguments."""
    value = normalized(x, weight, bias, eps)
    if z is not None:
        value = value + (z if z_weight is None or z_bias is None else normalized(z, z_weight, z_bias, eps))
    return value.relu()


def normalized(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) * weight + bias by channel, with the biased variance of the batch."""
    mean = x.mean((0, 2, 3), keepdim=True)
    var = (x - mean).square().mean((0, 2, 3), keepdim=True)
    return (x - mean) / (var + eps).sqrt() * weight.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)


def updated(
    x: Tensor, running_mean: Tensor, running_var: Tensor, batches: int, momentum: float | None
) -> tuple[Tensor, Tensor]:
    """Return the running statistics after a batch, the `batches`-th: an average over all of them without momentum."""
    share = 1 / batches if momentum is None else momentum
    var = x.var((0, 2, 3), unbiased=True)
    return running_mean + share * (x.mean((0, 2, 3)) - running_mean), running_var + share * (var - running_var)
