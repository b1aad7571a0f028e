"""LARS or SGD with momentum, over parameter groups that leave biases and normalizations without decay."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from fasttrain.callbacks.optimizers import LARS, parameter_groups
from fasttrain.errors import ConfigError
from fasttrain.recipes.resnet50.schedule import END_LR, POWER, learning_rate, scaled_lr


@dataclass(frozen=True)
class OptimizerConfig:
    """How the weights are trained; the defaults are NVIDIA's in MLPerf v2.0 on one node, 3,264 images a step."""

    name: Literal["lars", "sgd"] = "lars"
    lr: float = 10.5
    """Peak of the learning rate."""
    lr_for_batch: int | None = 3264
    """The global batch that `lr` is for; at another one it is scaled (LARS: by the root of the ratio; SGD: by the
    ratio). null takes `lr` as it is."""
    batch_size: int = 408
    """Images a step and process; the data tells."""
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 5e-5
    """Of matrices and kernels; biases and the parameters of normalizations have none, nor LARS's trust."""
    trust_coefficient: float = 0.001
    """LARS's eta."""
    momentum_correction: bool = False
    """NVIDIA's form of LARS, whose momentum follows the learning rate; MLPerf's reference has none."""
    warmup_epochs: float = 2.0
    """Epochs over which the learning rate rises linearly."""
    end_lr: float = END_LR
    """At the last step."""
    power: float = POWER
    """Of the polynomial that leads there."""

    def __post_init__(self) -> None:
        if self.warmup_epochs < 0 or self.lr <= 0:
            raise ConfigError(
                f"module.optimizer: lr={self.lr} and warmup_epochs={self.warmup_epochs}; lr > 0 and warmup_epochs >= 0 "
                "are needed."
            )


def make_optimizer(
    module: nn.Module, config: OptimizerConfig, steps_per_epoch: float, total_steps: float, batches_per_step: int
) -> dict[str, Any]:
    """Return what `configure_optimizers` returns: the optimizer, and its schedule by step.

    Args:
        module: whose parameters are trained.
        config: the numbers.
        steps_per_epoch: optimizer steps of an epoch, for the warm-up.
        total_steps: of the run, for the decay.
        batches_per_step: processes times accumulated batches, for the global batch.

    Raises:
        ConfigError: a decay without an end.
    """
    if not math.isfinite(total_steps):
        raise ConfigError("module.optimizer: the learning rate needs an end: set trainer.max_epochs or max_steps.")
    base = scaled_lr(config.lr, config.batch_size * batches_per_step, config.lr_for_batch, config.name == "lars")
    optimizer = _optimizer(parameter_groups(module, config.weight_decay), config, base)
    warmup_steps = round(config.warmup_epochs * steps_per_epoch) if config.warmup_epochs else 0
    lr = learning_rate(base, warmup_steps, total_steps, min(config.end_lr, base), config.power)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr(step) / base)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _optimizer(groups: list[dict[str, Any]], config: OptimizerConfig, lr: float) -> torch.optim.Optimizer:
    if config.name == "lars":
        return LARS(
            groups, lr=lr, momentum=config.momentum, trust_coefficient=config.trust_coefficient,
            nesterov=config.nesterov, lr_in_momentum=not config.momentum_correction,
        )  # fmt: skip
    plain = [{name: value for name, value in group.items() if name != "adapt"} for group in groups]
    return torch.optim.SGD(plain, lr=lr, momentum=config.momentum, nesterov=config.nesterov)
