"""A stage's convolutions in every tier: forward with bias, residual and ReLU, and the gradients of map and weight.

On NVIDIA GPUs all of a forward is one kernel of cuDNN's, which costs little more than the convolution alone. PyTorch
has it as operators without a derivative, made for inference.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from fasttrain.callbacks.bottleneck.operators import Geometry

LAST = torch.channels_last
_FUSED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# cuDNN counts elements in 32 bits; PyTorch splits larger convolutions, and the fused operators of it does not.
_MOST_ELEMENTS = 2**31
# Shapes for which cuDNN has said that it has no such kernel; asking again would take as long.
_refused: set[object] = set()


def convolution(x: Tensor, weight: Tensor, bias: Tensor, geometry: Geometry, add: Tensor | None = None) -> Tensor:
    """Return relu(conv(x) + bias [+ add]).

    Args:
        x: (N, C, H, W), channels_last.
        weight: (O, C / groups, kernel height, kernel width), channels_last, in x's dtype.
        bias: (O,), in x's dtype.
        geometry: of the convolution.
        add: of the output's shape and dtype, channels_last.
    """
    key = (x.shape, x.dtype, x.device, weight.shape, geometry, add is None)
    if key not in _refused and _is_for_cudnn(x, weight):
        try:
            if add is None:
                y: Tensor = torch.cudnn_convolution_relu(x, weight, bias, *geometry)
            else:
                y = torch.cudnn_convolution_add_relu(x, weight, add, 1.0, bias, *geometry)
            return y.contiguous(memory_format=LAST)  # itself
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # its text depends on the versions of PyTorch and cuDNN
            _refused.add(key)
    y = F.conv2d(x, weight, bias, *geometry)
    if add is not None:
        y += add
    return y.relu_().contiguous(memory_format=LAST)


def projection(x: Tensor, weight: Tensor, step: int) -> Tensor:
    """Return a 1x1 convolution of x at every step-th pixel, without bias or ReLU."""
    return F.conv2d(x, weight, stride=step).contiguous(memory_format=LAST)


def projection_gradient(g: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the input of a 1x1 convolution of stride 1, in new memory."""
    return F.conv_transpose2d(g, weight).contiguous(memory_format=LAST)


def data_gradient(g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Return the gradient of a convolution's input x, whose shape alone counts, in new memory."""
    return _gradients(g, x, weight, geometry, (True, False, False))[0].contiguous(memory_format=LAST)


def weight_gradient(g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Return the gradient of a convolution's weight, in the weight's dtype."""
    return _gradients(g, x, weight, geometry, (False, True, False))[1]


def _gradients(
    g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    stride, padding, dilation, groups = geometry
    return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
        g, x, weight, None, stride, padding, dilation, False, (0, 0), groups, wanted
    )


def _is_for_cudnn(x: Tensor, weight: Tensor) -> bool:
    n, channels, height, width = x.shape
    largest = n * height * width * max(channels, weight.shape[0])
    return (
        x.is_cuda and torch.version.hip is None and torch.backends.cudnn.enabled and x.dtype in _FUSED_DTYPES
        and 0 < largest < _MOST_ELEMENTS
    )  # fmt: skip
