"""The tier for everything else: the same formula in PyTorch's operators, which autograd differentiates by itself.

ReLU keeps its own output, which the next convolution keeps anyway. torch.compile makes one kernel of it.
"""

import torch
from torch import Tensor

from fasttrain.callbacks.folded_norm import ScaleBias


def scale_bias_relu(x: Tensor, folded: ScaleBias, z: Tensor | None, z_folded: ScaleBias | None) -> Tensor:
    """Return relu(x * scale + bias [+ z | + z * z_scale + z_bias]), computed in float32 or more."""
    bias = folded.bias if z_folded is None else folded.bias + z_folded.bias
    value = torch.addcmul(_per_channel(bias), x, _per_channel(folded.scale))
    if z is not None and z_folded is not None:
        value = value.addcmul_(z, _per_channel(z_folded.scale))
    elif z is not None:
        value = value.add_(z)
    return value.relu_().to(result_dtype(x, z))


def result_dtype(x: Tensor, z: Tensor | None) -> torch.dtype:
    """Return the dtype of the output: that of x, or what PyTorch gives a sum of x and z."""
    return x.dtype if z is None else torch.promote_types(x.dtype, z.dtype)


def _per_channel(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1)
