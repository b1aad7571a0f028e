"""cuDNN's convolution with bias and ReLU in one kernel, which costs no more than the convolution alone.

PyTorch has it as an operator without a derivative, made for inference.
"""

import torch
from torch import Tensor

from fasttrain.callbacks.conv_bias_relu import in_triton
from fasttrain.callbacks.conv_bias_relu.geometry import Geometry
from fasttrain.callbacks.conv_bias_relu.refusals import is_refusal

# Shapes for which cuDNN has said that it has no such kernel; asking again would take as long.
_refused: set[object] = set()


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, rounded_bias: Tensor, geometry: Geometry, relu: bool
) -> Tensor:  # fmt: skip
    """Return the output, channels_last, by cuDNN; for what cuDNN refuses, by `in_triton`.

    Args:
        x: (N, C, H, W), channels_last.
        weight: (O, C / groups, kernel height, kernel width), channels_last, in x's dtype.
        bias: (O,).
        rounded_bias: the same in x's dtype.
        geometry: of the convolution.
        relu: without one this is `in_triton`'s.
    """
    key = (x.shape, x.stride(), x.dtype, x.device, weight.shape, geometry)
    if relu and key not in _refused:
        stride, padding, dilation, groups = geometry
        try:
            y = torch.cudnn_convolution_relu(x, weight, rounded_bias, stride, padding, dilation, groups)
            return y.contiguous(memory_format=torch.channels_last)  # itself
        except RuntimeError as error:
            if not is_refusal(error, x):
                raise
            _refused.add(key)
    return in_triton.forward(x, weight, bias, rounded_bias, geometry, relu)
