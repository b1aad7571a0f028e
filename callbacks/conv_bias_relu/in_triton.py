"""PyTorch's convolution, then one pass of ours over its output: where cuDNN has no fused kernel, and without a ReLU.

PyTorch does not use cuDNN's bias either: its convolution adds it in a pass, which reaches half of the memory's speed.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fasttrain.callbacks.conv_bias_relu.geometry import Geometry
from fasttrain.callbacks.conv_bias_relu.kernel import bias_kernel
from fasttrain.callbacks.relu_bias_backward import as_rows
from fasttrain.callbacks.relu_bias_backward.in_triton import rows_together


@dataclass(frozen=True)
class Tiling:
    """How much a program takes."""

    elements: int = 4096
    """Of a tile, which lie in `elements / columns` rows."""
    columns: int = 256
    """Of a tile: 512 bytes of a row in 16 bits."""
    warps: int = 4
    """Of a program."""


TILING = Tiling()


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, rounded_bias: Tensor, geometry: Geometry, relu: bool
) -> Tensor:  # fmt: skip
    """Return the output, channels_last; arguments as of `in_cudnn.forward`."""
    stride, padding, dilation, groups = geometry
    y = torch.convolution(x, weight, None, stride, padding, dilation, False, [0, 0], groups)
    y = y.contiguous(memory_format=torch.channels_last)
    add_bias(as_rows(y), bias, relu)
    return y


def add_bias(y: Tensor, bias: Tensor, relu: bool, tiling: Tiling = TILING) -> None:
    """Add a bias (C,) to each row of y, dense (M, C), and apply a ReLU if wanted. Mutates y."""
    count, channels = y.shape
    if not y.numel():
        return
    together = rows_together(count, channels, tiling.columns)
    rows, width = count // together, channels * together
    columns = min(tiling.columns, 2 ** math.ceil(math.log2(width)))
    tile_rows = max(1, tiling.elements // columns)
    with torch.cuda.device_of(y):
        bias_kernel[(-(-rows // tile_rows), -(-width // columns))](
            y, bias.contiguous(), rows, WIDTH=width, CHANNELS=channels, RELU=relu, ROWS=tile_rows, COLUMNS=columns,
            num_warps=tiling.warps,
        )  # fmt: skip
