"""The obvious version: the same training step in full fp32.

Graded *same quality*: losses differ by the rounding of the smaller type, and a run must reach the same target. For a
single step the tolerances below hold relative to the largest gradient of the fp32 step.
"""

from typing import Any

import lightning.pytorch as pl
import torch

TOLERANCE = {
    torch.bfloat16: 5e-2,  # 8 bits of mantissa: rounding 4e-3 an operation, a network of some ten layers
    torch.float16: 1e-2,  # 11 bits: rounding 5e-4
}


def reference(module: pl.LightningModule, batch: Any) -> torch.Tensor:
    """Return the loss of a training step without autocast."""
    output: Any = module.training_step(batch, 0)
    loss = output["loss"] if isinstance(output, dict) else output
    assert isinstance(loss, torch.Tensor)
    return loss
