"""When fused convolution, bias and ReLU apply: the Lightning callback, and the plan's door."""

from dataclasses import dataclass
from typing import Any, ClassVar

from fasttrain.callbacks.conv_bias_relu.sites import ConvBiasReLUPatches
from fasttrain.patches import PatchCallback, PatchConfig, PatchOptimization


@dataclass(frozen=True)
class ConvBiasReLUConfig(PatchConfig):
    """How conv_bias_relu decides."""


class FusedConvBiasReLU(PatchCallback):
    """Fuses convolutions with bias and the ReLU behind them: `Trainer(callbacks=[FusedConvBiasReLU()])`.

    Acts before the optimizer is made, on every nn.Conv2d with a bias; the ReLU behind it is seen in an nn.Sequential
    and in a forward that can be traced. `undo()` puts the old modules back.

    Raises:
        OptimizationError: at `setup`, when the model has no such convolution.
    """

    def __init__(self) -> None:
        super().__init__(ConvBiasReLUPatches())


class ConvBiasReLUOptimization(PatchOptimization[ConvBiasReLUConfig]):
    """The plan's door."""

    name: ClassVar[str] = "conv_bias_relu"
    summary: ClassVar[str] = "convolution, bias and ReLU in one kernel; the gradients of ReLU and bias in one pass"
    config_class: ClassVar[type[Any]] = ConvBiasReLUConfig
    for_channels_last = True

    def make_callback(self) -> FusedConvBiasReLU:
        """Return the callback."""
        return FusedConvBiasReLU()
