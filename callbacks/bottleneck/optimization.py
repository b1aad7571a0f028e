"""The two doors of fused bottleneck stages: a Lightning callback and the plan's optimization."""

from dataclasses import dataclass
from typing import Any, ClassVar

from fasttrain.callbacks.bottleneck.sites import BottleneckPatches
from fasttrain.errors import ConfigError
from fasttrain.patches import PatchCallback, PatchOptimization


@dataclass(frozen=True)
class BottleneckConfig:
    """How bottleneck decides, and its streams."""

    measure: bool = True
    """Time the training step with and without first, on this machine, and refuse where it is not faster."""
    least_gain: float = 0.02
    """The share of step time that must be saved; below it the difference is noise."""
    side_streams: int = 1
    """For scaling weights and for weight gradients, beside the main stream; 0 to have both on that."""

    def __post_init__(self) -> None:
        if self.side_streams < 0:
            raise ConfigError(
                f"optimizations.bottleneck.side_streams is a number of streams, 0 or more; this is {self.side_streams}."
            )


class FusedBottlenecks(PatchCallback):
    """Computes stages of frozen bottleneck blocks as one function each: `Trainer(callbacks=[FusedBottlenecks()])`.

    Acts before the optimizer is made, on every nn.Sequential of torchvision's Bottlenecks. `undo()` puts them back.

    Args:
        side_streams: for scaling weights and for weight gradients.

    Raises:
        OptimizationError: at `setup`, when the model has no such stage; in training, when a BatchNorm2d that was in
            eval mode is put into training mode.
    """

    def __init__(self, side_streams: int = 1) -> None:
        super().__init__(BottleneckPatches(side_streams))


class BottleneckOptimization(PatchOptimization[BottleneckConfig]):
    """The plan's door."""

    name: ClassVar[str] = "bottleneck"
    summary: ClassVar[str] = (
        "stages of frozen bottleneck blocks as one function, convolutions with bias, residual and ReLU"
    )
    config_class: ClassVar[type[Any]] = BottleneckConfig
    # It takes whole stages; what is left, the stem for instance, is frozen_bn's.
    before: ClassVar[frozenset[str]] = frozenset({"frozen_bn"})
    for_channels_last = True

    def make_callback(self) -> FusedBottlenecks:
        """Return the callback."""
        return FusedBottlenecks(self.config.side_streams)
