"""What a frozen normalization does to its convolution: a scale for the weight, a bias for the result.

The folding itself, which must notice each change of the statistics at little cost, is shared with frozen_bn: the two
rooms act on one model, and must agree about which normalizations are frozen and what they come to.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fasttrain.callbacks.folded_norm import Folded, why_not_frozen
from fasttrain.errors import OptimizationError


class Constant(NamedTuple):
    """Of one convolution's output channels, (C,) each."""

    scale: Tensor
    """float32, or float64 where the statistics are."""
    bias: Tensor
    """Likewise."""
    rounded: Tensor
    """The bias in the dtype of the maps, as cuDNN takes it."""


class Constants:
    """The constants of one normalization, computed once and again, in the same memory, after its tensors changed."""

    def __init__(self, norm: nn.Module) -> None:
        self.norm = norm
        self._folded = Folded(norm, "bottleneck")
        self._rounded: dict[torch.dtype, tuple[Tensor, Tensor, int]] = {}

    def __call__(self, dtype: torch.dtype) -> Constant:
        """Return them for maps of a dtype.

        Raises:
            OptimizationError: the normalization is not frozen any more.
        """
        if isinstance(self.norm, nn.BatchNorm2d) and (reason := why_not_frozen(self.norm)):
            raise OptimizationError(
                f"bottleneck: a BatchNorm2d of {self.norm.num_features} channels that was frozen when its stage was "
                f"fused is now {reason}; keep it in eval mode with requires_grad=False, or leave bottleneck out."
            )
        scale, bias = self._folded()
        return Constant(scale, bias, bias if bias.dtype == dtype else self._round(bias, dtype))

    def _round(self, bias: Tensor, dtype: torch.dtype) -> Tensor:
        kept = self._rounded.get(dtype)
        if kept is not None and kept[1] is bias and kept[2] == bias._version:
            return kept[0]
        if bias.is_cuda and torch.cuda.is_current_stream_capturing():
            return bias.to(dtype)  # has no value until the graph is replayed, so it can't be kept
        with torch.inference_mode(False), torch.no_grad():
            # The same memory if possible, because a captured CUDA graph may read it.
            rounded = bias.to(dtype) if kept is None or kept[0].device != bias.device else kept[0].copy_(bias)
        self._rounded[dtype] = (rounded, bias, bias._version)
        return rounded
