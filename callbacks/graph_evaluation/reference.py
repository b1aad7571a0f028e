"""The obvious version: the call itself."""

from collections.abc import Callable
from typing import Any

import torch

TOLERANCE = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0}
"""None: a replay launches the kernels of the eager call. Where these add in no fixed order, two eager calls differ too,
and a replay may differ by a few times as much (`cuda_graph_step/self_check.py`)."""


def reference(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what the call returns, without gradients."""
    with torch.no_grad():
        return call(*args, **kwargs)
