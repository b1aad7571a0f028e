"""Convolution, bias and ReLU by Apex's ConvBiasReLU, and its trial: on some versions of cuDNN it ends the process.

Apex: https://github.com/NVIDIA/apex, apex/contrib/conv_bias_relu, built with `--fused_conv_bias_relu`. It takes float16
in channels_last, casts everything else to it under autocast, and keeps x, weight and its own output for the backward.
"""

import torch
from torch import Tensor
from torch.nn import functional

from fasttrain.proving import Trial

TRIAL = Trial("Apex's ConvBiasReLU", "apex", f"{__name__}:trial")

SHAPES = ((64, 64, 3, 1, 1), (64, 128, 1, 0, 1), (64, 64, 3, 1, 2))
"""Input and output channels, kernel, padding and stride of what is tried: heads, and a bottleneck's convolutions."""


def conv_bias_relu(x: Tensor, weight: Tensor, bias: Tensor, padding: int, stride: int) -> Tensor:
    """Return relu(conv2d(x, weight, bias)) of float16 tensors in channels_last; differentiable once.

    Call it only where `prove(TRIAL).ok`: Apex is imported here.
    """
    from apex.contrib.conv_bias_relu import ConvBiasReLU  # type: ignore[import-not-found]

    output: Tensor = ConvBiasReLU(x, weight, bias.view(1, -1, 1, 1), padding, stride)
    return output


def trial() -> None:
    """Compare output and gradients with PyTorch's in float64.

    Inputs are small whole numbers and biases lie between two: every sum is exact in any order, and no output is 0,
    where the ReLU's gradient is a matter of rounding.

    Raises:
        AssertionError: a number is off.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)

    def whole(*shape: int, most: int) -> Tensor:
        values = torch.randint(-most, most + 1, shape, generator=generator).to(device, torch.float16)
        return values.to(memory_format=torch.channels_last) if len(shape) == 4 else values

    for channels, outputs, kernel, padding, stride in SHAPES:
        x = whole(2, channels, 16, 16, most=2)
        weight = whole(outputs, channels, kernel, kernel, most=1)
        bias = whole(outputs, most=8) + 0.5
        leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
        found = conv_bias_relu(x, weight, bias, padding, stride)
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        wanted = functional.conv2d(exact[0], exact[1], exact[2], padding=padding, stride=stride).relu()
        dy = whole(*wanted.shape, most=1)
        gradients = torch.autograd.grad(found, leaves, dy)
        wanted_gradients = torch.autograd.grad(wanted, exact, dy.double())
        names = ("output", "gradient of x", "gradient of weight", "gradient of bias")
        for name, one, other in zip(names, (found, *gradients), (wanted, *wanted_gradients), strict=True):
            _assert_equal(name, one, other)


def _assert_equal(name: str, found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-3, msg=lambda text: f"{name}: {text}")
