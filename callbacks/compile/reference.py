"""The obvious version: the same module, run by Python.

The compiler puts element-wise operations into one kernel, where intermediate values are not rounded to the activations'
type, and sums in another order. Dropout draws other random numbers. Tolerances are relative to the largest value of the
reference.
"""

from typing import Any

import torch
from torch import nn

TOLERANCE = {
    torch.float64: 1e-12,  # a dozen roundings of 1e-16
    torch.float32: 1e-5,  # sums of some thousand products, rounding 6e-8 each
    torch.float16: 1e-2,  # rounding 5e-4, and a chain of them that the compiler leaves out
    torch.bfloat16: 6e-2,  # rounding 4e-3
}


def reference(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return what a module that may be compiled gives without."""
    return module._call_impl(*args, **kwargs)
