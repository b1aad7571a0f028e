"""The obvious version: F.linear and relu, layer by layer.

The fused chain rounds where PyTorch under autocast rounds: parameters, every activation and its gradient to the
autocast dtype; sums are float32. Its gradients of float32 parameters are not rounded to 16 bits on their way.

Tolerances are relative to the largest value of the reference in float64 with the same inputs, where no rounding decides
a ReLU. On random data of 16 bits some do: if a share p of a layer's values passes on one side and not on the other, a
gradient is off by about sqrt(p) of its norm, which is 2 % for the nearest 0.04 %, for PyTorch as much as for these.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,  # sums of thousands of products, each rounded by 6e-8
    torch.float16: 4e-3,  # 5e-4 by rounding: one in the forward and one or two in the backward of each layer
    torch.bfloat16: 3e-2,  # 4e-3 by rounding: likewise
}
"""Of values and gradients of a chain of up to five layers."""


def reference(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], relu_last: bool = True) -> Tensor:
    """Return relu(... relu(x W0' + b0) ... W' + b); the last ReLU only if `relu_last`."""
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        x = F.linear(x, weight, bias)
        if relu_last or i < len(weights) - 1:
            x = F.relu(x)
    return x
