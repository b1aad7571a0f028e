"""The two doors of fused batch normalization in training: a Lightning callback and the plan's optimization."""

from typing import Any, ClassVar

from fasttrain.callbacks.bn_relu.sites import BNReLUPatches
from fasttrain.patches import PatchCallback, PatchConfig, PatchOptimization


class FusedBNReLU(PatchCallback):
    """Fuses batch normalization in training with ReLU and addition: `Trainer(callbacks=[FusedBNReLU()])`.

    Acts before the optimizer is made, on torchvision's residual blocks, on neighbours in an nn.Sequential, and on
    children of other modules whose forward can be traced. `undo()` puts the old modules back.

    Raises:
        OptimizationError: at `setup`, when the model has no such place.
    """

    def __init__(self) -> None:
        super().__init__(BNReLUPatches())


class BNReLUOptimization(PatchOptimization[PatchConfig]):
    """The plan's door."""

    name: ClassVar[str] = "bn_relu"
    summary: ClassVar[str] = "batch norm in training, in few passes with ReLU and the residual addition"
    config_class: ClassVar[type[Any]] = PatchConfig
    for_channels_last: ClassVar[bool] = True

    def make_callback(self) -> PatchCallback:
        """Return `FusedBNReLU`."""
        return FusedBNReLU()
