"""The room's two doors: a Lightning callback and the plan's optimization."""

from typing import Any, ClassVar

from fasttrain.callbacks.layer_norm_dropout.sites import LayerNormDropoutPatches
from fasttrain.patches import PatchCallback, PatchConfig, PatchOptimization


class FusedDropoutAddLayerNorm(PatchCallback):
    """Fuses dropout, residual addition and layer normalization: `Trainer(callbacks=[FusedDropoutAddLayerNorm()])`.

    Acts before the optimizer is made, on nn.TransformerEncoderLayer with norm_first=False and on modules that are
    norm(dropout(dense(x)) + residual), as BERT's outputs. `undo()` puts the old modules back.

    Raises:
        OptimizationError: at `setup`, when the model has no such place.
    """

    def __init__(self) -> None:
        super().__init__(LayerNormDropoutPatches())


class LayerNormDropoutOptimization(PatchOptimization[PatchConfig]):
    """The plan's door."""

    name: ClassVar[str] = "layer_norm_dropout"
    summary: ClassVar[str] = "dropout, residual addition and layer normalization in one pass, its mask never stored"
    config_class: ClassVar[type[Any]] = PatchConfig
    # That room looks for a BERT layer's own output module, whose place this one takes.
    after: ClassVar[frozenset[str]] = PatchOptimization.after | {"gemm_gelu"}

    def make_callback(self) -> PatchCallback:
        """Return the callback."""
        return FusedDropoutAddLayerNorm()
