"""Who computes."""

from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor

from fasttrain.callbacks.conv_bias_relu import in_apex
from fasttrain.callbacks.conv_bias_relu.geometry import Geometry
from fasttrain.environment import triton_runs
from fasttrain.errors import OptimizationError, nearest
from fasttrain.fingerprint import why_not_importable

Tier = Literal["auto", "cudnn", "cudnn_graph", "triton", "torch", "apex"]
"""cudnn: bias and ReLU in cuDNN's kernel. cudnn_graph: the bias alone too. triton: PyTorch's convolution, then bias and
ReLU in one pass. These have the backward in which the ReLU's and the bias's gradients are one pass. torch: conv2d and
relu. apex: Apex's operator where it can be believed, and where not, as "auto"."""

# cuDNN counts elements in 32 bits; PyTorch splits larger convolutions, and this operator of it does not.
_MOST_ELEMENTS = 2**31


def tier_for(
    asked: Tier, x: Tensor, weight: Tensor, dtype: torch.dtype, geometry: Geometry, relu: bool
) -> Tier:  # fmt: skip
    """Return a tier other than "auto" for an input and a weight, computed in `dtype`.

    Raises:
        OptimizationError: there is no such tier, or what was asked for can't take these.
    """
    if asked not in get_args(Tier):
        raise OptimizationError(f"conv_bias_relu: there is no tier '{asked}'; {nearest(asked, get_args(Tier))}")
    if asked == "torch":
        return asked
    reason = _why_not_fused(x, weight, dtype)
    if asked == "apex" and reason is None and in_apex.takes(x, weight, dtype, geometry, relu):
        return asked
    if asked in ("auto", "apex"):
        if reason is not None or not x.is_cuda or not triton_runs() or not _is_channels_last(x, weight):
            return "torch"
        if not _cudnn_is_good_at(x, weight, geometry):
            return "triton"
        if relu:
            return "cudnn"
        return "cudnn_graph" if dtype.itemsize == 2 and geometry.groups == 1 and _has_cudnn_graph() else "triton"
    if asked == "cudnn_graph" and not _has_cudnn_graph():
        reason = "the package nvidia-cudnn-frontend is not installed (pip install 'fasttrain[cudnn]')"
    if asked in ("cudnn", "cudnn_graph") and not x.is_cuda:
        reason = f"an NVIDIA GPU is needed, and x is on {x.device.type}"
    if reason is not None:
        raise OptimizationError(f"conv_bias_relu: tier='{asked}' can't take this: {reason}; tier='auto' can.")
    return asked


def autocast_dtype(kind: str) -> torch.dtype | None:
    """Return the dtype that autocast computes in on this kind of device; None where it is off or there is none."""
    enabled = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if enabled else None


def _why_not_fused(x: Tensor, weight: Tensor, dtype: torch.dtype) -> str | None:
    if x.dim() != 4 or not x.numel():
        return f"x must be (N, C, H, W) with something in it, and is {tuple(x.shape)}"
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"there are kernels for float16, bfloat16 and float32, and this is {dtype}"
    autocast = autocast_dtype(x.device.type) is not None
    if weight.device != x.device or (weight.dtype != dtype and (not autocast or weight.dtype == torch.float64)):
        return f"the weight is {weight.dtype} on {weight.device}, for x of {x.dtype} on {x.device}"
    return None


def _is_channels_last(x: Tensor, weight: Tensor) -> bool:
    """Whether conv2d itself would compute in channels_last."""
    last = torch.channels_last
    return x.is_contiguous(memory_format=last) or (
        weight.is_contiguous(memory_format=last) and not weight.is_contiguous()
    )


def _cudnn_is_good_at(x: Tensor, weight: Tensor, geometry: Geometry) -> bool:
    depthwise = geometry.groups > 1 and weight.shape[1] == 1  # for which PyTorch has kernels of its own
    largest = max(x.numel(), geometry.output_elements(x, weight))
    return torch.backends.cudnn.enabled and not depthwise and largest < _MOST_ELEMENTS


@cache
def _has_cudnn_graph() -> bool:
    return why_not_importable("cudnn") is None
