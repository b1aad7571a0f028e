"""The obvious version: a linear layer, GELU, a linear layer.

The fused block rounds to the tensors' dtype three times: what goes into GELU (or in the other way, GELU's derivative),
GELU, and the gradient of what went into it. PyTorch's operators round what comes back to GELU's output too.

Tolerances are relative to the largest value of the reference in float64, given the same rounded inputs; a sum of N
rounded terms of either sign is off by about sqrt(N) roundings of one term, which is less than one rounding of the
largest sum.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 3e-5,  # the polynomial in GELU's derivative, and float32 sums
    torch.float16: 2e-3,  # three roundings of 5e-4, seldom all at their largest
    torch.bfloat16: 1.6e-2,  # three roundings of 4e-3
}


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, weight_2: Tensor, bias_2: Tensor | None, approximate: str = "none"
) -> Tensor:
    """Return linear(gelu(linear(x))), shapes as of `linear_gelu_linear`."""
    return F.linear(F.gelu(F.linear(x, weight, bias), approximate=approximate), weight_2, bias_2)
