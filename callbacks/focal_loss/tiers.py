"""Who computes: the Triton kernel where there is one for the logits, plain PyTorch elsewhere."""

from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from fasttrain.callbacks.focal_loss import in_torch

Tier = Literal["auto", "triton", "torch"]


def tier_for(asked: Tier, logits: Tensor) -> ModuleType:
    """Return the module that computes: `in_triton` or `in_torch`, which have the same functions."""
    if asked == "torch" or (asked == "auto" and not (logits.device.type == "cuda" and triton_runs())):
        return in_torch
    from fasttrain.callbacks.focal_loss import in_triton  # where Triton isn't installed it can't be imported

    return in_triton if asked == "triton" or in_triton.can_take(logits) else in_torch


@cache
def triton_runs() -> bool:
    """Whether Triton is installed, for NVIDIA GPUs: the kernel has lines of their assembly."""
    return torch.version.hip is None and find_spec("triton") is not None
