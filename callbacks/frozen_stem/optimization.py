"""When a fused frozen stem applies, and its two doors: a Lightning callback and the plan's optimization."""

from dataclasses import dataclass
from typing import Any, ClassVar

from fasttrain.callbacks.frozen_stem.sites import FrozenStemPatches
from fasttrain.patches import PatchCallback, PatchConfig, PatchOptimization


@dataclass(frozen=True)
class FrozenStemConfig(PatchConfig):
    """How frozen_stem decides."""


class FusedFrozenStem(PatchCallback):
    """Computes the frozen stem of a residual network in two kernels: `Trainer(callbacks=[FusedFrozenStem()])`.

    Acts before the optimizer is made. `undo()` puts the old modules back.

    Raises:
        OptimizationError: at `setup`, when the model has no such stem.
    """

    def __init__(self) -> None:
        super().__init__(FrozenStemPatches())


class FrozenStemOptimization(PatchOptimization[FrozenStemConfig]):
    """The plan's door."""

    name: ClassVar[str] = "frozen_stem"
    summary: ClassVar[str] = "a residual network's frozen stem: its 7 x 7 as a 4 x 4, and one pass for all that follows"
    config_class: ClassVar[type[Any]] = FrozenStemConfig
    # It takes the normalization of the stem, with the pooling behind it.
    before: ClassVar[frozenset[str]] = frozenset({"frozen_bn"})
    for_channels_last = True

    def make_callback(self) -> FusedFrozenStem:
        """Return the callback."""
        return FusedFrozenStem()
