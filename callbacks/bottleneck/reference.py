"""The obvious version: torchvision's own blocks, in float64.

TOLERANCE is of a map, or of a gradient for which no ReLU decides otherwise than the reference: the largest difference
as a share of the largest value. Some elements lie within rounding of zero, and pass a ReLU on one side alone. Their
gradient is then wrong by all of its size, which no precision of the products can help: with values off by a share e of
their spread, about 0.8 e of the elements are such, so each ReLU adds sqrt(0.8 e) to the relative norm of the
difference. GRADIENT_TOLERANCE is of that norm, for stages of up to nine ReLUs.
"""

import copy

import torch
from torch import Tensor, nn

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,  # sums of up to some thousand products
    torch.float16: 6e-3,  # ten roundings of 5e-4, of weights and maps
    torch.bfloat16: 5e-2,  # of 4e-3
}
GRADIENT_TOLERANCE = {
    torch.float64: 1e-6,
    torch.float32: 3e-3,
    torch.float16: 0.1,
    torch.bfloat16: 0.3,
}


def reference(stage: nn.Sequential) -> nn.Sequential:
    """Return a float64 copy of a stage, plain or fused, whose blocks are called one after another."""
    return nn.Sequential(*copy.deepcopy(stage)).double()


def off(found: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference as a share of the norm of what is wanted."""
    return float((found.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))
