"""Convolution, bias and ReLU by Apex's ConvBiasReLU, and its trial: on some versions of cuDNN it ends the process.

Apex: https://github.com/NVIDIA/apex, apex/contrib/conv_bias_relu, built with `--fused_conv_bias_relu`. It takes float16
in channels_last, casts everything else to it under autocast, and keeps x, weight and its own output for the backward.
"""

from functools import cache

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn import functional

from fasttrain.callbacks.conv_bias_relu.geometry import Geometry
from fasttrain.callbacks.conv_bias_relu.refusals import is_capturing, is_refusal
from fasttrain.proving import Trial, prove

TRIAL = Trial("Apex's ConvBiasReLU", "apex", f"{__name__}:trial")

SHAPES = ((64, 64, 3, 1, 1), (64, 128, 1, 0, 1), (64, 64, 3, 1, 2))
"""Input and output channels, kernel, padding and stride of what is tried: heads, and a bottleneck's convolutions."""

_right: dict[object, bool] = {}


def conv_bias_relu(x: Tensor, weight: Tensor, bias: Tensor, padding: int, stride: int) -> Tensor:
    """Return relu(conv2d(x, weight, bias)) of float16 tensors in channels_last; differentiable once.

    Call it only where `takes` says so: Apex is imported here.
    """
    from apex.contrib.conv_bias_relu import ConvBiasReLU  # type: ignore[import-not-found]

    output: Tensor = ConvBiasReLU(x, weight, bias.view(1, -1, 1, 1), padding, stride)
    if output.requires_grad:
        output.register_hook(_in_channels_last)  # its backward takes nothing else
    return output


@cache
def is_proven() -> bool:
    """Whether Apex's operator can be believed on this machine. If not, one warning says why."""
    proof = prove(TRIAL)
    if not proof.ok:
        rank_zero_warn(f"conv_bias_relu: tier='apex' was asked for, and can't be had: {proof.reason}; 'auto' goes on.")
    return proof.ok


def takes(x: Tensor, weight: Tensor, dtype: torch.dtype, geometry: Geometry, relu: bool) -> bool:
    """Whether Apex's operator computes this, and rightly.

    Where cuDNN has no kernel for a shape, Apex prints that and returns what was in memory. So a shape is computed both
    ways once; one that comes up in the capture of a CUDA graph first is not taken.
    """
    if not _is_made_for(x, weight, dtype, geometry, relu):
        return False
    key = (x.shape, weight.shape, x.device, geometry)
    if key not in _right:
        if is_capturing(x):
            return False
        _right[key] = is_proven() and _is_right_for(x, weight, geometry)
    return _right[key]


def _is_made_for(x: Tensor, weight: Tensor, dtype: torch.dtype, geometry: Geometry, relu: bool) -> bool:
    stride, padding, dilation, groups = geometry
    square = stride[0] == stride[1] and padding[0] == padding[1]
    aligned = x.dim() == 4 and x.shape[1] % 8 == 0 and len(weight) % 8 == 0  # Apex promises cuDNN 16 bytes
    tried_there = x.is_cuda or not torch.cuda.is_available()
    wanted = relu and dtype == torch.float16 and square and dilation == (1, 1) and groups == 1
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return wanted and aligned and tried_there and last and x.numel() > 0 and weight.device == x.device


def _is_right_for(x: Tensor, weight: Tensor, geometry: Geometry) -> bool:
    """Compare output and gradients with PyTorch's, for random values in the shapes of these; warn if they differ."""
    generator = torch.Generator(x.device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        values = torch.randn(shape, dtype=torch.float16, device=x.device, generator=generator)
        return values.to(memory_format=torch.channels_last) if len(shape) == 4 else values

    scale = weight[0].numel() ** -0.5
    like_x, like_weight, like_bias = random(*x.shape), random(*weight.shape) * scale, random(len(weight))
    leaves = [t.requires_grad_() for t in (like_x, like_weight, like_bias)]
    with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
        wanted = functional.conv2d(like_x, like_weight, like_bias, geometry.stride, geometry.padding).relu()
        dy = random(*wanted.shape)
        right = [wanted, *torch.autograd.grad(wanted, leaves, dy)]
        try:
            found = conv_bias_relu(like_x, like_weight, like_bias, geometry.padding[0], geometry.stride[0])
            off = max(map(_off, [found, *torch.autograd.grad(found, leaves, dy)], right))
        except Exception as error:
            if not is_refusal(error, x):
                raise
            off = float("inf")
    # Elements within rounding of zero pass the ReLU on one side only; what was in memory is off by more than all.
    if off < 0.1:
        return True
    rank_zero_warn(
        f"conv_bias_relu: Apex's ConvBiasReLU is wrong for x of {tuple(x.shape)} and a weight of {tuple(weight.shape)} "
        "here, though right in its trial; 'auto' goes on for these."
    )
    return False


def _off(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach().float(), wanted.detach().float()
    return float((found - wanted).norm() / wanted.norm())


def _in_channels_last(g: Tensor) -> Tensor:
    return g.contiguous(memory_format=torch.channels_last)


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
