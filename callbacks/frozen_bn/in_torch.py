"""The tier for everything else: the same formula in PyTorch's operators, which autograd differentiates by itself.

ReLU keeps its own output, which the next convolution keeps anyway. torch.compile makes one kernel of it.
"""

import torch
from torch import Tensor

from fasttrain.callbacks.frozen_bn.fold import ScaleBias


def scale_bias_relu(x: Tensor, folded: ScaleBias, z: Tensor | None, z_folded: ScaleBias | None) -> Tensor:
    """Return relu(x * scale + bias [+ z | + z * z_scale + z_bias]), computed in float32 or more."""
    value = x * _per_channel(folded.scale) + _per_channel(folded.bias)
    if z is not None and z_folded is not None:
        value = value + (z * _per_channel(z_folded.scale) + _per_channel(z_folded.bias))
    elif z is not None:
        value = value + z
    return value.relu().to(result_dtype(x, z))


def result_dtype(x: Tensor, z: Tensor | None) -> torch.dtype:
    """Return the dtype of the output: that of x, or what PyTorch gives a sum of x and z."""
    return x.dtype if z is None else torch.promote_types(x.dtype, z.dtype)


def _per_channel(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1)
