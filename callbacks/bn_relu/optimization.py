"""The two doors of fused batch normalization in training: a Lightning callback and the plan's optimization."""

from dataclasses import dataclass
from typing import Any, ClassVar

from fasttrain.callbacks.bn_relu.sites import BNReLUPatches
from fasttrain.patches import PatchCallback, PatchConfig, PatchOptimization


@dataclass(frozen=True)
class BNReLUConfig(PatchConfig):
    """How bn_relu decides, and what it takes."""

    pool: bool = False
    """Take the max-pooling of a ResNet's stem into the same passes. Off, since no GPU has run it yet."""


class FusedBNReLU(PatchCallback):
    """Fuses batch normalization in training with ReLU and addition: `Trainer(callbacks=[FusedBNReLU()])`.

    Acts before the optimizer is made, on torchvision's residual blocks, on neighbours in an nn.Sequential, and on
    children of other modules whose forward can be traced. `undo()` puts the old modules back.

    Args:
        pool: see `BNReLUConfig`.

    Raises:
        OptimizationError: at `setup`, when the model has no such place.
    """

    def __init__(self, pool: bool = False) -> None:
        super().__init__(BNReLUPatches(pool))


class BNReLUOptimization(PatchOptimization[BNReLUConfig]):
    """The plan's door."""

    name: ClassVar[str] = "bn_relu"
    summary: ClassVar[str] = "batch norm in training, in few passes with ReLU and the residual addition"
    config_class: ClassVar[type[Any]] = BNReLUConfig
    for_channels_last: ClassVar[bool] = True

    def make_callback(self) -> PatchCallback:
        """Return `FusedBNReLU`."""
        return FusedBNReLU(self.config.pool)
