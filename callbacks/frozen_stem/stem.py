"""The body: a frozen stem as a function and as a module. For any loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fasttrain.callbacks.folded_norm import Folded, ScaleBias
from fasttrain.environment import triton_runs
from fasttrain.errors import OptimizationError

if TYPE_CHECKING:
    from jaxtyping import Float

Tier = Literal["auto", "triton", "torch"]
ROOM = "frozen_stem"


def frozen_stem(
    x: Float[Tensor, "B 3 H W"], weight: Float[Tensor, "K 3 7 7"], folded: ScaleBias, tier: Tier = "auto"
) -> Float[Tensor, "B K h w"]:
    """Return max_pool(relu(conv(x) * scale + bias)): 7 x 7 at stride 2 padded by 3, then 3 x 3 at stride 2 padded by 1.

    Args:
        x: images, floating point. For the kernels height and width are even.
        weight: of the convolution, in the dtype in which to compute, which is the result's.
        folded: scale and bias by channel, see `folded_norm.fold`.
        tier: "auto" takes the kernels on NVIDIA GPUs where nothing wants a gradient, and PyTorch's operators elsewhere
            and under torch.compile. "triton" is for the interpreter.

    Raises:
        OptimizationError: shapes don't fit.
    """
    if x.dim() != 4 or weight.shape[1:] != (3, 7, 7) or x.shape[1] != 3 or not x.is_floating_point():
        raise OptimizationError(
            f"frozen_stem: images are floating point (B, 3, H, W) and weights (K, 3, 7, 7); these are {x.dtype} of "
            f"{tuple(x.shape)} and {tuple(weight.shape)}."
        )
    if not torch.compiler.is_compiling() and _takes_kernels(x, weight, folded, tier):
        from fasttrain.callbacks.frozen_stem import in_triton  # where Triton isn't installed it can't be imported

        with torch.no_grad():
            return in_triton.stem(x, weight, folded)
    y = F.conv2d(x.to(weight.dtype), weight, stride=2, padding=3)
    y = (y * folded.scale.reshape(1, -1, 1, 1) + folded.bias.reshape(1, -1, 1, 1)).relu().to(y.dtype)
    return F.max_pool2d(y, 3, stride=2, padding=1)


class FrozenStem(nn.Conv2d):
    """The convolution of a stem that does what follows it too; made by `sites`, around the convolution's weight."""

    _folded: Folded

    def forward(self, input: Tensor) -> Tensor:
        """Return the stem's output, in the autocast's dtype or that of the images."""
        kind = input.device.type
        if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
            return frozen_stem(input, self.weight, self._folded())
        weight = self.weight.to(torch.get_autocast_dtype(kind))
        with torch.autocast(kind, enabled=False):
            return frozen_stem(input, weight, self._folded())


def _takes_kernels(x: Tensor, weight: Tensor, folded: ScaleBias, tier: Tier) -> bool:
    if tier == "torch" or (tier == "auto" and (x.device.type != "cuda" or not triton_runs())):
        return False
    from fasttrain.callbacks.frozen_stem import in_triton

    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return False
    return in_triton.can_take(x, weight, folded)
