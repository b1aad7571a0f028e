"""The obvious version: torchvision's FrozenBatchNorm2d formula, an addition, a ReLU.

The fused kernels compute in float32 and round once, at the end. Tolerances are relative to the largest value of the
reference in float64, given the same rounded inputs. An element whose sum is within rounding of zero may pass the ReLU
on one side and not on the other: gradients are compared where the reference is not that near to zero.
"""

import torch
from torch import Tensor

from fasttrain.callbacks.folded_norm import ScaleBias

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,  # three roundings of 6e-8, of terms up to a few times the sum
    torch.float16: 1e-3,  # one rounding of 5e-4
    torch.bfloat16: 8e-3,  # one rounding of 4e-3
}


def reference(x: Tensor, folded: ScaleBias, z: Tensor | None = None, z_folded: ScaleBias | None = None) -> Tensor:
    """Return relu(x * scale + bias [+ z | + z * z_scale + z_bias])."""
    value = normalized(x, folded)
    if z is not None:
        value = value + (z if z_folded is None else normalized(z, z_folded))
    return value.relu()


def normalized(x: Tensor, folded: ScaleBias) -> Tensor:
    """Return x * scale + bias by channel, x of shape (N, C, H, W)."""
    return x * folded.scale.reshape(1, -1, 1, 1) + folded.bias.reshape(1, -1, 1, 1)
