"""The obvious version: Lightning's own step, run eagerly by plain PyTorch, once for each batch.

A graph launches the kernels that the eager step launches, in the same order, so that with deterministic kernels every
bit is equal. Kernels that add in no fixed order (atomics) differ between any two runs; what is allowed then is told by
two eager steps from the same state (`self_check.py`). What may differ from the *unprepared* optimizer is its own
arithmetic: a learning rate in float32 on the device, and the fused kernel where the user chose none.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TOLERANCE = {
    # Relative, of parameters after one step, prepared optimizer against plain: one rounding of the learning rate and
    # one of the update, of a value that is itself a small part of the parameter.
    torch.float64: 1e-7,
    torch.float32: 1e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
}


def reference(loss_of: Callable[[Any], Tensor], optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
    """Do one training step eagerly and return its loss.

    Args:
        loss_of: forward pass and loss of a batch.
        optimizer: its parameters are updated in place.
        batch: on the device.
    """
    loss = loss_of(batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()
