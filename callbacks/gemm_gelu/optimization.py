"""When the fused feed-forward block applies: the Lightning callback, and the plan's door."""

from dataclasses import dataclass
from typing import Any, ClassVar

from fasttrain.callbacks.gemm_gelu.sites import FeedForwardPatches
from fasttrain.patches import PatchCallback, PatchConfig, PatchOptimization


@dataclass(frozen=True)
class GemmGELUConfig(PatchConfig):
    """How gemm_gelu decides."""


class FusedGemmGELU(PatchCallback):
    """Runs Linear, GELU, Linear as one function: `Trainer(callbacks=[FusedGemmGELU()])`.

    Acts before the optimizer is made, on every nn.Sequential in which the three follow one another, and on BERT layers.
    `undo()` puts the old modules back.

    Raises:
        OptimizationError: at `setup`, when the model has no such place.
    """

    def __init__(self) -> None:
        super().__init__(FeedForwardPatches())


class GemmGELUOptimization(PatchOptimization[GemmGELUConfig]):
    """The plan's door."""

    name: ClassVar[str] = "gemm_gelu"
    summary: ClassVar[str] = "GELU, its gradient and the bias gradient inside of the feed-forward block's products"
    config_class: ClassVar[type[Any]] = GemmGELUConfig

    def make_callback(self) -> FusedGemmGELU:
        """Return the callback."""
        return FusedGemmGELU()
