"""The body: batch normalization with constants, ReLU and the residual addition as one pass. Works in any loop."""

from typing import Literal

import torch
from torch import Tensor

from fasttrain.callbacks.folded_norm import ScaleBias
from fasttrain.callbacks.frozen_bn import in_torch
from fasttrain.environment import triton_runs
from fasttrain.errors import OptimizationError
from fasttrain.twin import twin_of, with_twin

Tier = Literal["auto", "triton", "torch"]
ROOM = "frozen_bn"


def scale_bias_relu(x: Tensor, folded: ScaleBias, tier: Tier = "auto") -> Tensor:
    """Return relu(x * scale + bias) by channel, in x's dtype and memory format.

    Args:
        x: (N, C, H, W), float16, bfloat16, float32, or float64 (in plain PyTorch). Contiguous or channels_last;
            anything else is copied to channels_last first.
        folded: scale and bias, (C,) each, which get no gradient; see `fold`.
        tier: "auto" takes the Triton kernels on NVIDIA GPUs, and PyTorch's operators elsewhere and under torch.compile,
            which fuses them by itself. "triton" is for the interpreter.

    Raises:
        OptimizationError: shapes don't fit, or scale or bias wants a gradient; in the backward of the Triton tier, if
            it is to be differentiated again.
    """
    return _fused(x, folded, None, None, tier, twice=False)


def scale_bias_add_relu(x: Tensor, folded: ScaleBias, z: Tensor, tier: Tier = "auto", twice: bool = False) -> Tensor:
    """Return relu(x * scale + bias + z), in the dtype of x + z; z is (N, C, H, W) too. See `scale_bias_relu`.

    Args:
        twice: the output will be used twice, one of the two times through `twin`.
    """
    return _fused(x, folded, z, None, tier, twice)


def scale_bias_dual_relu(
    x: Tensor, folded: ScaleBias, z: Tensor, z_folded: ScaleBias, tier: Tier = "auto", twice: bool = False
) -> Tensor:
    """Return relu((x * scale + bias) + (z * z_scale + z_bias)). See `scale_bias_add_relu`."""
    return _fused(x, folded, z, z_folded, tier, twice)


def twin(y: Tensor) -> Tensor:
    """Return `y` for a second use of it: the same values, with a gradient of its own if it was made with `twice`.

    A tensor's two gradients are otherwise added by a pass over memory before the backward of the tensor begins.
    """
    return twin_of(y, ROOM)


def _fused(
    x: Tensor, folded: ScaleBias, z: Tensor | None, z_folded: ScaleBias | None, tier: Tier, twice: bool
) -> Tensor:
    if torch.compiler.is_compiling():
        return in_torch.scale_bias_relu(x, folded, z, z_folded)
    _check(x, folded, z, z_folded)
    if not _takes_triton(tier, x, folded, z):
        return in_torch.scale_bias_relu(x, folded, z, z_folded)
    from fasttrain.callbacks.frozen_bn import in_triton  # where Triton isn't installed it can't be imported
    from fasttrain.callbacks.frozen_bn.eager import ScaleBiasReLU

    x = _dense(x)
    if z is not None:
        z = z.contiguous(memory_format=_format(x))
    if not torch.is_grad_enabled() or not (x.requires_grad or (z is not None and z.requires_grad)):
        return in_triton.forward(x, folded, z, z_folded, keep_mask=False)[0]
    z_scale, z_bias = (None, None) if z_folded is None else z_folded
    result = ScaleBiasReLU.apply(x, z, folded.scale, folded.bias, z_scale, z_bias, twice)
    if not twice:
        return result  # type: ignore[no-any-return]
    y, other = result
    return with_twin(y, other, ROOM)


def _takes_triton(tier: Tier, x: Tensor, folded: ScaleBias, z: Tensor | None) -> bool:
    if tier != "auto":
        return tier == "triton"
    kernels = torch.float16, torch.bfloat16, torch.float32
    return (
        x.device.type == "cuda"
        and triton_runs()
        and x.dtype in kernels
        and (z is None or z.dtype in kernels)
        and folded.scale.dtype == torch.float32
    )


def _dense(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.contiguous(memory_format=torch.channels_last)  # itself, if it is that already


def _format(x: Tensor) -> torch.memory_format:
    last = x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def _check(x: Tensor, folded: ScaleBias, z: Tensor | None, z_folded: ScaleBias | None) -> None:
    if x.dim() != 4 or not x.is_floating_point():
        raise OptimizationError(
            f"frozen_bn: a feature map is floating point of shape (N, C, H, W); this one is {x.dtype} of {_shape(x)}."
        )
    if z is not None and (z.shape != x.shape or z.device != x.device):
        raise OptimizationError(
            f"frozen_bn: what is added has the shape and device of x, {_shape(x)} on {x.device}; this is "
            f"{_shape(z)} on {z.device}."
        )
    for values in (*folded, *(z_folded or ())):
        if values.shape != x.shape[1:2] or values.device != x.device:
            raise OptimizationError(
                f"frozen_bn: scale and bias have one value for each of the {x.shape[1]} channels, on {x.device}; these "
                f"have shape {_shape(values)} on {values.device}."
            )
        if values.requires_grad:
            raise OptimizationError(
                "frozen_bn: scale and bias are constants and get no gradient, and one of these requires it; detach it, "
                "or use BatchNorm2d."
            )


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
