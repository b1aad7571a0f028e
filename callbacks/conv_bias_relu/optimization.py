"""When fused convolution, bias and ReLU apply: the Lightning callback, and the plan's door."""

from dataclasses import dataclass
from typing import Any, ClassVar

import lightning.pytorch as pl

from fasttrain.callbacks.conv_bias_relu import in_apex
from fasttrain.callbacks.conv_bias_relu.sites import ConvBiasReLUPatches
from fasttrain.callbacks.conv_bias_relu.tiers import Tier
from fasttrain.patches import PatchCallback, PatchConfig, PatchOptimization


@dataclass(frozen=True)
class ConvBiasReLUConfig(PatchConfig):
    """How conv_bias_relu decides, and who computes."""

    tier: Tier = "auto"
    """Who computes each call; see the table of tiers."""


class FusedConvBiasReLU(PatchCallback):
    """Fuses convolutions with bias and the ReLU behind them: `Trainer(callbacks=[FusedConvBiasReLU()])`.

    Acts before the optimizer is made, on every nn.Conv2d with a bias; the ReLU behind it is seen in an nn.Sequential
    and in a forward that can be traced. `undo()` puts the old modules back.

    Args:
        tier: who computes. With "apex", Apex's operator is tried first in a process of its own, and a warning says so
            if it can't be used.

    Raises:
        OptimizationError: at `setup`, when the model has no such convolution; in training, when a tier that was asked
            for can't take what comes.
    """

    def __init__(self, tier: Tier = "auto") -> None:
        super().__init__(ConvBiasReLUPatches(tier))
        self.tier = tier

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Replace the modules."""
        if self.tier == "apex":
            in_apex.is_proven()
        super().setup(trainer, pl_module, stage)


class ConvBiasReLUOptimization(PatchOptimization[ConvBiasReLUConfig]):
    """The plan's door."""

    name: ClassVar[str] = "conv_bias_relu"
    summary: ClassVar[str] = "convolution, bias and ReLU in one kernel; the gradients of ReLU and bias in one pass"
    config_class: ClassVar[type[Any]] = ConvBiasReLUConfig
    for_channels_last = True

    def make_callback(self) -> FusedConvBiasReLU:
        """Return the callback."""
        return FusedConvBiasReLU(self.config.tier)
