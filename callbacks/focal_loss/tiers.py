"""Who computes: the Triton kernel where there is one for the logits, plain PyTorch elsewhere."""

from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Literal, get_args

import torch
from torch import Tensor

from fasttrain.callbacks.focal_loss import in_torch
from fasttrain.errors import OptimizationError, nearest

Tier = Literal["auto", "triton", "torch"]


def tier_for(asked: Tier, logits: Tensor) -> ModuleType:
    """Return the module that computes: `in_triton` or `in_torch`, which have the same functions.

    Raises:
        OptimizationError: Triton was asked for and has no kernel for these logits, or there is no such tier.
    """
    if asked not in get_args(Tier):
        raise OptimizationError(f"focal_loss: there is no tier '{asked}'; {nearest(asked, get_args(Tier))}")
    if asked == "torch" or (asked == "auto" and not (logits.device.type == "cuda" and triton_runs())):
        return in_torch
    from fasttrain.callbacks.focal_loss import in_triton  # where Triton isn't installed it can't be imported

    if in_triton.can_take(logits):
        return in_triton
    if asked == "auto":
        return in_torch
    raise OptimizationError(
        f"focal_loss: tier='triton' has no kernel for {logits.shape[2]} classes in {logits.dtype} on "
        f"{logits.device.type}: it takes float16, bfloat16 and float32, up to {in_triton.LARGEST_ROW_BYTES // 1024} "
        "KiB an anchor, on an NVIDIA GPU; tier='auto' takes PyTorch instead."
    )


@cache
def triton_runs() -> bool:
    """Whether Triton is installed, for NVIDIA GPUs: the kernel has lines of their assembly."""
    return torch.version.hip is None and find_spec("triton") is not None
