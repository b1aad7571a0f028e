"""The obvious version: the four operators one after another, in the dtype of what comes in.

Tolerances are relative to the largest value of the reference in float64, given the same rounded inputs. A product of
147 terms has its own order of summation; the normalization is computed in float32 and rounded once, at the end, but the
convolution's output is rounded before it, and the scale enlarges that.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fasttrain.callbacks.folded_norm import ScaleBias

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,  # sums of 147 terms in another order
    torch.float16: 2e-3,  # two roundings of 5e-4
    torch.bfloat16: 1.6e-2,  # two roundings of 4e-3
}


def reference(x: Tensor, weight: Tensor, folded: ScaleBias) -> Tensor:
    """Return max_pool(relu(conv(x) * scale + bias)): 7 x 7 at stride 2, then 3 x 3 at stride 2."""
    y = F.conv2d(x, weight, stride=2, padding=3)
    y = y * folded.scale.reshape(1, -1, 1, 1) + folded.bias.reshape(1, -1, 1, 1)
    return F.max_pool2d(y.relu(), 3, stride=2, padding=1)
