"""The obvious version: a convolution with its bias, and a ReLU.

Tolerances are relative to the norm of the reference in float64, given the same rounded inputs. An element whose sum is
within rounding of zero may pass the ReLU on one side and not on the other; such ones are few, and a norm bears them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fasttrain.callbacks.conv_bias_relu.geometry import Geometry

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,  # sums of some thousand terms of 6e-8, with TF32 off
    torch.float16: 2e-3,  # one or two roundings of 5e-4, and those of a masked gradient
    torch.bfloat16: 1.6e-2,  # likewise of 4e-3
}
"""Of the output and of the gradients of input, weight and bias."""


def reference(x: Tensor, weight: Tensor, bias: Tensor, geometry: Geometry, relu: bool) -> Tensor:
    """Return conv2d(x, weight) + bias, with ReLU or without."""
    y = F.conv2d(x, weight, bias, geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
    return y.relu() if relu else y
