"""When fused frozen batch norm applies, and its two doors: a Lightning callback and the plan's optimization."""

from dataclasses import dataclass
from typing import Any, ClassVar

from fasttrain.callbacks.frozen_bn.sites import FrozenBNPatches
from fasttrain.patches import PatchCallback, PatchConfig, PatchOptimization


@dataclass(frozen=True)
class FrozenBNConfig(PatchConfig):
    """How frozen_bn decides."""


class FusedFrozenBN(PatchCallback):
    """Fuses frozen batch normalization with ReLU and residual addition: `Trainer(callbacks=[FusedFrozenBN()])`.

    Acts before the optimizer is made, on torchvision's residual blocks, on neighbours in an nn.Sequential, and on
    children of other modules whose forward can be traced. `undo()` puts the old modules back.

    Raises:
        OptimizationError: at `setup`, when the model has no such place; in training, when a BatchNorm2d that was in
            eval mode is put into training mode.
    """

    def __init__(self) -> None:
        super().__init__(FrozenBNPatches())


class FrozenBNOptimization(PatchOptimization[FrozenBNConfig]):
    """The plan's door."""

    name: ClassVar[str] = "frozen_bn"
    summary: ClassVar[str] = "frozen batch norm folded once, in one pass with ReLU and the residual addition"
    config_class: ClassVar[type[Any]] = FrozenBNConfig
    for_channels_last = True

    def make_callback(self) -> FusedFrozenBN:
        """Return the callback."""
        return FusedFrozenBN()
