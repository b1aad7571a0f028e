"""Learning rate schedules, stepped with each batch, for the tests of the graph step."""

from typing import Any

import torch


def step_lr(optimizer: torch.optim.Optimizer) -> Any:
    return {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5), "interval": "step"}
