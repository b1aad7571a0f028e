"""LAMB or AdamW, and the learning rate over the steps of a run."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from fasttrain.callbacks.optimizers import LAMB, parameter_groups
from fasttrain.errors import ConfigError


@dataclass(frozen=True)
class OptimizerConfig:
    """How the weights are trained; the defaults are MLPerf v2.0's for a global batch of 448 (one node)."""

    name: Literal["lamb", "adamw"] = "lamb"
    lr: float = 4.25e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01
    """Of matrices and embeddings; biases and normalizations are left to themselves, also by LAMB's rescaling."""
    max_grad_norm: float | None = 1.0
    """LAMB's own clipping of the global norm. AdamW's is trainer.gradient_clip_val."""
    warmup_steps: int = 0
    start_warmup_step: int = 0
    """Step at which the warm-up begins; a negative one has the run begin in the middle of it."""
    total_steps: int | None = None
    """Step at which the learning rate is 0; null is the run's last."""
    decay_power: float = 1.0
    fused: bool | None = False
    """Have LAMB's step done by Triton kernels; null takes them on an NVIDIA GPU, where they can be."""


def make_optimizer(module: nn.Module, config: OptimizerConfig, run_steps: float) -> dict[str, Any]:
    """Return what `configure_optimizers` returns: the optimizer over all parameters, and its schedule by step.

    Args:
        run_steps: optimizer steps of the run, infinite if it has no end.

    Raises:
        ConfigError: there is no last step.
    """
    total_steps = config.total_steps if config.total_steps is not None else run_steps
    if not math.isfinite(total_steps):
        raise ConfigError(
            "module.optimizer.total_steps is not set, and the run has no end at which the learning rate is 0; set it, "
            "or trainer.max_steps."
        )
    groups = parameter_groups(module, config.weight_decay)
    optimizer: torch.optim.Optimizer
    if config.name == "lamb":
        optimizer = LAMB(
            groups, lr=config.lr, betas=config.betas, eps=config.eps, max_grad_norm=config.max_grad_norm,
            fused=config.fused,
        )  # fmt: skip
    else:
        groups = [{name: value for name, value in group.items() if name != "adapt"} for group in groups]
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    factor = learning_rate_factor(config.warmup_steps, config.start_warmup_step, total_steps, config.decay_power)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def learning_rate_factor(
    warmup_steps: int, start_step: int, total_steps: float, power: float = 1.0
) -> Callable[[int], float]:
    """Return step (from 0) -> factor of the learning rate.

    Steps are counted from 1, as MLPerf v2.0's BERT does: while fewer than `warmup_steps` have gone since `start_step`,
    their share of it; then (1 - step / total_steps) ** power, in which the shift has no part.
    """

    def factor(step: int) -> float:
        since_start = step + 1 - start_step
        if since_start < warmup_steps:
            return max(0.0, since_start / warmup_steps)
        return float((1 - min(1.0, (step + 1) / total_steps)) ** power)

    return factor
