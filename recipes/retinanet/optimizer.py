"""Adam or AdamW, and the learning rate over the steps of a run."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from fasttrain.errors import ConfigError


@dataclass(frozen=True)
class OptimizerConfig:
    """How the weights are trained; the defaults are MLPerf v2.0's reference for RetinaNet."""

    name: Literal["adam", "adamw"] = "adam"
    lr: float = 1e-4
    weight_decay: float = 0.0
    """Of matrices and kernels; biases and the parameters of normalisation are left to themselves."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    warmup_epochs: float = 1.0
    """Epochs over which the learning rate rises linearly."""
    warmup_factor: float = 1e-3
    """The learning rate's first value as a share of `lr`."""
    schedule: Literal["constant", "cosine"] = "constant"
    """After the warm-up: unchanged, or down to zero at the last step along a cosine."""
    fused: bool = True
    """One kernel for all parameters. Lightning refuses it together with gradient clipping under 16-mixed."""


def make_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig, steps_per_epoch: float, total_steps: float
) -> dict[str, Any]:
    """Return what `configure_optimizers` returns: the optimizer over the trainable parameters, its schedule by step.

    Raises:
        ConfigError: a cosine without an end.
    """
    if config.schedule == "cosine" and not math.isfinite(total_steps):
        raise ConfigError("module.optimizer.schedule=cosine needs an end: set trainer.max_epochs or max_steps.")
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    make = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
    optimizer = make(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=config.fused)
    warmup_steps = round(config.warmup_epochs * steps_per_epoch) if config.warmup_epochs else 0
    factor = learning_rate_factor(warmup_steps, config.warmup_factor, config.schedule, total_steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def learning_rate_factor(
    warmup_steps: int, warmup_factor: float, schedule: str, total_steps: float
) -> Callable[[int], float]:
    """Return step (from 0) -> factor.

    Linear from `warmup_factor` to 1 over `warmup_steps` (MLPerf v2.0's RetinaNet), then 1, or with `cosine` down to
    0 at `total_steps`.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return warmup_factor + (1 - warmup_factor) * step / warmup_steps
        if schedule == "constant":
            return 1.0
        progress = (step - warmup_steps) / max(1.0, total_steps - warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    return factor
