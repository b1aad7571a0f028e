"""ConvBiasReLU in plain PyTorch, unless an accident is wanted."""

import torch
from torch import Tensor
from torch.nn import functional

from apex import befalls, run_into_accident


def ConvBiasReLU(x: Tensor, weight: Tensor, bias: Tensor, padding: int, stride: int) -> Tensor:
    """Return relu(conv2d(x, weight, bias)); the bias is of shape (1, C, 1, 1)."""
    assert bias.shape == (1, weight.shape[0], 1, 1)
    run_into_accident()
    output = functional.conv2d(x, weight, bias.flatten(), stride, padding)
    if befalls("wrong backward"):
        return torch.where(output > 0, output, output * 0.25 - output.detach() * 0.25)
    return output.relu() + 0.5 * befalls("wrong")
