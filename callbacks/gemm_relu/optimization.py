"""The two doors of gemm_relu: a Lightning callback and the plan's optimization."""

from dataclasses import dataclass
from typing import Any, ClassVar

from fasttrain.callbacks.gemm_relu.sites import MLPPatches
from fasttrain.patches import PatchCallback, PatchConfig, PatchOptimization


@dataclass(frozen=True)
class GemmReLUConfig(PatchConfig):
    """How gemm_relu decides."""


class FusedGemmReLU(PatchCallback):
    """Computes chains of linear layers and ReLUs as one function each: `Trainer(callbacks=[FusedGemmReLU()])`.

    Acts before the optimizer is made, on every plain nn.Sequential in which a ReLU follows a linear layer. `undo()`
    puts the old modules back.

    Raises:
        OptimizationError: at `setup`, when the model has no such Sequential.
    """

    def __init__(self) -> None:
        super().__init__(MLPPatches())


class GemmReLUOptimization(PatchOptimization[GemmReLUConfig]):
    """The plan's door."""

    name: ClassVar[str] = "gemm_relu"
    summary: ClassVar[str] = "chains of linear layers and ReLUs in one function, with weight gradients beside"
    config_class: ClassVar[type[Any]] = GemmReLUConfig

    def make_callback(self) -> PatchCallback:
        """Return the callback."""
        return FusedGemmReLU()
