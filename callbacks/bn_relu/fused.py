"""The body: batch normalization in training, ReLU and the residual addition in few passes. Works in any loop."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fasttrain.callbacks.bn_relu import in_torch
from fasttrain.environment import triton_runs
from fasttrain.errors import OptimizationError
from fasttrain.twin import twin_of, with_twin

Tier = Literal["auto", "triton", "torch"]
ROOM = "bn_relu"


def batch_norm_relu(x: Tensor, norm: nn.BatchNorm2d, tier: Tier = "auto") -> Tensor:
    """Return relu(norm(x)) in x's dtype and memory format; update the running statistics as `norm` does.

    Args:
        x: (N, C, H, W), float16, bfloat16, float32, or float64 (in PyTorch's operators). The kernels are for
            channels_last; a contiguous map is left to PyTorch, and anything else is copied to channels_last.
        norm: holds parameters, statistics and the mode. In evaluation mode with running statistics, PyTorch's.
        tier: "auto" takes the Triton kernels on NVIDIA GPUs for float32 parameters, and PyTorch's operators elsewhere
            and under torch.compile, which fuses them by itself. "triton" is for the interpreter.

    Raises:
        OptimizationError: `norm` is no nn.BatchNorm2d, or x doesn't fit it; in the backward of the Triton tier, if it
            is to be differentiated again.
        ValueError: of PyTorch, for one value by channel in training.
    """
    return _fused(x, norm, None, None, tier, twice=False)


def batch_norm_add_relu(x: Tensor, norm: nn.BatchNorm2d, z: Tensor, tier: Tier = "auto", twice: bool = False) -> Tensor:
    """Return relu(norm(x) + z), in the dtype of x + z; z is (N, C, H, W) too. See `batch_norm_relu`.

    Args:
        twice: the output will be used twice, one of the two times through `twin`.
    """
    return _fused(x, norm, z, None, tier, twice)


def batch_norm_dual_relu(
    x: Tensor, norm: nn.BatchNorm2d, z: Tensor, z_norm: nn.BatchNorm2d, tier: Tier = "auto", twice: bool = False
) -> Tensor:
    """Return relu(norm(x) + z_norm(z)). See `batch_norm_add_relu`."""
    return _fused(x, norm, z, z_norm, tier, twice)


def batch_norm_relu_pool(x: Tensor, norm: nn.BatchNorm2d, tier: Tier = "auto", twice: bool = False) -> Tensor:
    """Return max_pool2d(relu(norm(x)), 3, stride=2, padding=1), as in a ResNet's stem. See `batch_norm_add_relu`.

    The kernels take channels that are a power of two, from 8 to 256; PyTorch pools others after `batch_norm_relu`.
    """
    _check(x, norm, x)
    if not torch.compiler.is_compiling() and _takes_triton(tier, x, norm, None, None):
        from fasttrain.callbacks.bn_relu import in_triton, pooled

        if pooled.can_pool(x):
            x = x.contiguous(memory_format=torch.channels_last)
            if not torch.is_grad_enabled() or not any(
                t is not None and t.requires_grad for t in (x, norm.weight, norm.bias)
            ):
                return pooled.normalize_and_pool(x, in_triton.statistics(x, norm), keep=False)[0]
            result = pooled.BatchNormReLUPool.apply(x, norm.weight, norm.bias, norm, twice)
            if not twice:
                return result  # type: ignore[no-any-return]
            y, other = result
            return with_twin(y, other, ROOM)
    return F.max_pool2d(batch_norm_relu(x, norm, tier), 3, stride=2, padding=1)


def twin(y: Tensor) -> Tensor:
    """Return `y` for a second use of it: the same values, with a gradient of its own if it was made with `twice`.

    A tensor's two gradients are otherwise added by a pass over memory before the backward of the tensor begins.
    """
    return twin_of(y, ROOM)


def _fused(
    x: Tensor, norm: nn.BatchNorm2d, z: Tensor | None, z_norm: nn.BatchNorm2d | None, tier: Tier, twice: bool
) -> Tensor:
    if torch.compiler.is_compiling():
        return in_torch.batch_norm_relu(x, norm, z, z_norm)
    for part, its_norm in ((x, norm), (z, z_norm)):
        _check(part, its_norm, x)
    if not _takes_triton(tier, x, norm, z, z_norm):
        return in_torch.batch_norm_relu(x, norm, z, z_norm)
    from fasttrain.callbacks.bn_relu import eager  # where Triton isn't installed it can't be imported

    x = x.contiguous(memory_format=torch.channels_last)
    z = None if z is None else z.contiguous(memory_format=torch.channels_last)
    parameters = (norm.weight, norm.bias, *((None, None) if z_norm is None else (z_norm.weight, z_norm.bias)))
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in (x, z, *parameters)):
        return eager.forward(x, norm, z, z_norm, keep_mask=False)[0]
    result = eager.BatchNormReLU.apply(x, z, *parameters, norm, z_norm, twice)
    if not twice:
        return result  # type: ignore[no-any-return]
    y, other = result
    return with_twin(y, other, ROOM)


def _takes_triton(tier: Tier, x: Tensor, norm: nn.BatchNorm2d, z: Tensor | None, z_norm: nn.BatchNorm2d | None) -> bool:
    norms = [norm] if z_norm is None else [norm, z_norm]
    if tier == "torch" or x.numel() <= x.shape[1] or not all(_of_the_batch(one) for one in norms):
        return False
    if tier == "triton":
        return True
    kernels = torch.float16, torch.bfloat16, torch.float32
    return (
        x.device.type == "cuda"
        and triton_runs()
        and x.dtype in kernels
        and (z is None or z.dtype in kernels)
        and all((one.weight is None) == (one.bias is None) for one in norms)
        and all(t.dtype == torch.float32 for one in norms for t in _values(one))
        # A map in PyTorch's first memory format goes on in it, and so in its operators.
        and (x.is_contiguous(memory_format=torch.channels_last) or not x.is_contiguous())
    )


def _of_the_batch(norm: nn.BatchNorm2d) -> bool:
    return norm.training or norm.running_mean is None


def _values(norm: nn.BatchNorm2d) -> list[Tensor]:
    # Of one dictionary each, because this is done for each normalization in every step.
    parameters, buffers = norm._parameters, norm._buffers
    values = parameters["weight"], parameters["bias"], buffers["running_mean"], buffers["running_var"]
    return [value for value in values if value is not None]


def _check(x: Tensor | None, norm: nn.BatchNorm2d | None, other: Tensor) -> None:
    if norm is not None and not isinstance(norm, nn.BatchNorm2d):
        raise OptimizationError(
            f"bn_relu: a normalization is an nn.BatchNorm2d, whose statistics are those of one process; this is a "
            f"{type(norm).__name__}."
        )
    if x is None:
        return
    if x.dim() != 4 or not x.is_floating_point():
        raise OptimizationError(
            f"bn_relu: a feature map is floating point of shape (N, C, H, W); this one is {x.dtype} of {_shape(x)}."
        )
    if x.shape != other.shape or x.device != other.device:
        raise OptimizationError(
            f"bn_relu: what is added has the shape and device of x, {_shape(other)} on {other.device}; this is "
            f"{_shape(x)} on {x.device}."
        )
    if norm is not None and x.shape[1] != norm.num_features:
        raise OptimizationError(
            f"bn_relu: this normalization is for {norm.num_features} channels, and the map of {_shape(x)} has "
            f"{x.shape[1]}."
        )


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
