"""A frozen batch normalization as one scale and one bias for each channel, computed once.

scale = weight / sqrt(running_var + eps), bias = bias - running_mean * scale (Ioffe and Szegedy, arXiv 1502.03167, with
the statistics as constants), in float32 whatever the input's dtype. Source of the method: NVIDIA's MLPerf Training v2.0
submissions of RetinaNet and Mask R-CNN.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

from fasttrain.errors import OptimizationError
from fasttrain.surgery import why_not_passed_by


class ScaleBias(NamedTuple):
    """What a frozen normalization does to channel c: x * scale[c] + bias[c]."""

    scale: Tensor
    """float32 (C,), or float64 where the statistics are."""
    bias: Tensor
    """Likewise."""


def fold(norm: nn.Module) -> ScaleBias:
    """Return scale and bias of a frozen normalization, new tensors on its device."""
    frozen: Any = norm
    dtype = torch.promote_types(frozen.running_var.dtype, torch.float32)
    scale = (frozen.running_var.to(dtype) + frozen.eps).rsqrt()
    if frozen.weight is not None:
        scale = frozen.weight.to(dtype) * scale
    bias = -frozen.running_mean.to(dtype) * scale
    return ScaleBias(scale, bias if frozen.bias is None else frozen.bias.to(dtype) + bias)


def why_not_frozen(norm: nn.Module) -> str | None:
    """Return what a normalization is that can't be folded, None for one that can, '' for a module that is none."""
    if isinstance(norm, FrozenBatchNorm2d) and type(norm).forward is FrozenBatchNorm2d.forward:
        return why_not_passed_by(norm)
    if not isinstance(norm, nn.BatchNorm2d) or type(norm).forward is not nn.BatchNorm2d.forward:
        return ""
    if norm.running_mean is None or norm.running_var is None:
        return "without running statistics"
    return _why_it_trains(norm) or why_not_passed_by(norm)


class Folded:
    """Scale and bias of one normalization, computed at the first call and again only after its tensors changed.

    Args:
        norm: one for which `why_not_frozen` is None.
        room: the optimization that uses it, for its errors.
    """

    def __init__(self, norm: nn.Module, room: str) -> None:
        self.norm, self.room = norm, room
        self._kept: ScaleBias | None = None
        self._of: tuple[tuple[Tensor | None, int, int], ...] = ()

    def __call__(self) -> ScaleBias:
        """Return them.

        Raises:
            OptimizationError: the normalization is not frozen any more.
        """
        if isinstance(self.norm, nn.BatchNorm2d) and (reason := _why_it_trains(self.norm)):
            raise OptimizationError(
                f"{self.room}: a BatchNorm2d of {self.norm.num_features} channels that was frozen when it was fused "
                f"is now {reason}; keep it in eval mode with requires_grad=False, or leave {self.room} out."
            )
        if torch.compiler.is_compiling():
            return fold(self.norm)  # some operations on C values, which go into the compiler's own kernels
        tensors = _tensors(self.norm)
        if self._kept is None or not self._are_unchanged(tensors):
            if _is_capturing(self.norm):
                return fold(self.norm)  # has no value until the graph is replayed, so it can't be kept
            self._refresh()
            self._of = tuple((tensor, *_state(tensor)) for tensor in tensors)
        assert self._kept is not None
        return self._kept

    def _are_unchanged(self, tensors: Sequence[Tensor | None]) -> bool:
        # Done for each normalization in every step, so by little more than identities.
        for tensor, (known, version, address) in zip(tensors, self._of, strict=True):
            if tensor is not known or (version, address) != _state(tensor):
                return False
        return True

    def _refresh(self) -> None:
        # Made by a validation in inference mode, they could not be saved for a backward later.
        with torch.inference_mode(False), torch.no_grad():
            new = fold(self.norm)
            old = self._kept
            if old is not None and (old.scale.device, old.scale.dtype) == (new.scale.device, new.scale.dtype):
                # The same memory, because a captured CUDA graph may read it.
                old.scale.copy_(new.scale)
                old.bias.copy_(new.bias)
            else:
                self._kept = new


def _tensors(norm: nn.Module) -> tuple[Tensor | None, ...]:
    buffers, parameters = norm._buffers, norm._parameters
    affine: Any = buffers if "weight" in buffers else parameters
    return affine["weight"], affine["bias"], buffers["running_mean"], buffers["running_var"]


def _state(tensor: Tensor | None) -> tuple[int, int]:
    """Return what another value, written in place or by `.data`, would change of a tensor."""
    if tensor is None:
        return 0, 0
    try:
        return tensor._version, tensor.data_ptr()
    except RuntimeError:  # made in inference mode, it counts no versions
        return -1, tensor.data_ptr()


def _is_capturing(norm: nn.Module) -> bool:
    variance: Any = norm.running_var
    return bool(variance.is_cuda) and torch.cuda.is_current_stream_capturing()


def _why_it_trains(norm: nn.BatchNorm2d) -> str | None:
    if norm.training:
        return "in training mode"
    if any(parameter.requires_grad for parameter in norm.parameters()):
        return "trainable in weight or bias"
    return None
