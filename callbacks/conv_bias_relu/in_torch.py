"""The tier for everything else: PyTorch's operators, which autograd differentiates and autocast casts by itself.

torch.compile fuses bias, ReLU and their gradients into passes of its own.
"""

import torch.nn.functional as F
from torch import Tensor

from fasttrain.callbacks.conv_bias_relu.geometry import Geometry


def conv_bias(x: Tensor, weight: Tensor, bias: Tensor, geometry: Geometry, relu: bool) -> Tensor:
    """Return conv2d(x, weight) + bias, with ReLU or without."""
    y = F.conv2d(x, weight, bias, geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
    return y.relu_() if relu else y  # a convolution does not keep its output
