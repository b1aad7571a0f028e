"""The obvious version: operands rounded to FP8 by one scale each, multiplied in float32.

TOLERANCE is of the kernels' path against this one, of the same scales, relative to the largest value: both multiply the
same numbers, and round the result once (the feed-forward block: twice, and a value of GELU's or of its gradient may be
rounded to another FP8 number where the kernel's polynomial differs in the last bits: one in some thousands, by 1/16).

ROUNDING is of either against float64 without any rounding, as the norm of the difference over the norm, for inputs of
random numbers: a rounding to 3 bits of mantissa is off by at most 1/16, 2.6 % in the mean square, to 2 bits twice that;
two operands add up like independent errors.
"""

import torch
from torch import Tensor
from torch.nn.functional import gelu

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
ROUNDING = {"y": 0.045, "dx": 0.07, "dw": 0.07, "db": 1e-5, "feed_forward": 0.09}


def quantized(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, headroom: float = 1.0) -> Tensor:
    """Return x as a format with one scale for all of it holds it, in float32."""
    scale = torch.finfo(dtype).max / headroom / x.abs().max().clamp(min=1e-30).float()
    return (x.float() * scale).to(dtype).float() / scale


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, headroom: float = 1.0) -> Tensor:
    """Return linear(x) of rounded operands, in float32."""
    y = quantized(x, headroom=headroom) @ quantized(weight, headroom=headroom).t()
    return y if bias is None else y + bias


def reference_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, headroom: float = 1.0, dtype: torch.dtype = torch.float8_e5m2
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias of rounded operands, in float32."""
    rounded = quantized(dy, dtype, headroom)
    dx = rounded @ quantized(weight, headroom=headroom)
    return dx, rounded.t() @ quantized(x, headroom=headroom), dy.float().sum(dim=0)


def reference_feed_forward(
    x: Tensor, weight: Tensor, bias: Tensor, weight_2: Tensor, bias_2: Tensor, approximate: str = "none"
) -> Tensor:
    """Return linear(gelu(linear(x))) of rounded operands, in float32."""
    return reference(gelu(reference(x, weight, bias), approximate=approximate), weight_2, bias_2)
