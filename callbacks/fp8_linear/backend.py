"""Who does the casts, and whether products in FP8 are possible at all."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from fasttrain.callbacks.fp8_linear import in_torch
from fasttrain.callbacks.fp8_linear.cast import Cast, Request
from fasttrain.environment import triton_runs

Backend = Callable[[Request], Cast]
Tier = Literal["auto", "triton", "torch"]
OLDEST_CAPABILITY = (8, 9)
MULTIPLE_OF = 16
"""torch's scaled product wants all sizes to be multiples of this."""


def backend_for(tier: Tier, x: Tensor, dtype: torch.dtype, widths: list[int]) -> Backend | None:
    """Return what casts for products of x, (tokens, in), or None where they are to be in x's own dtype.

    Args:
        tier: `auto` takes Triton where FP8 products are possible, and no FP8 elsewhere. `torch` casts and multiplies on
            any device, and `triton` under its interpreter, both to be tested.
        dtype: of the result.
        widths: features of input and outputs.
    """
    if torch.compiler.is_compiling():
        return None
    if tier == "torch":
        return in_torch.cast
    if tier == "auto" and not (x.is_cuda and _can(x.device, dtype, [len(x), *widths])):
        return None
    from fasttrain.callbacks.fp8_linear import in_triton  # without Triton it can't be imported

    return in_triton.cast


def _can(device: torch.device, dtype: torch.dtype, sizes: list[int]) -> bool:
    return (
        triton_runs()
        and torch.cuda.get_device_capability(device) >= OLDEST_CAPABILITY
        and dtype in (torch.bfloat16, torch.float16)
        and all(size and size % MULTIPLE_OF == 0 for size in sizes)
    )
