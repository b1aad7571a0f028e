"""When FP8 products apply: the Lightning callback, and the plan's door."""

from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from fasttrain.callbacks.fp8_linear.backend import OLDEST_CAPABILITY
from fasttrain.callbacks.fp8_linear.modules import HasScales
from fasttrain.callbacks.fp8_linear.scaling import GradientFormat, Kind, Scaling
from fasttrain.callbacks.fp8_linear.sites import FP8Patches
from fasttrain.errors import ConfigError, nearest
from fasttrain.optimization import Context, Grade, Refuses, Verdict
from fasttrain.patches import PatchCallback, PatchConfig, PatchOptimization

PRECISIONS = ("bf16-mixed", "16-mixed", "bf16-true", "16-true")


@dataclass(frozen=True)
class FP8LinearConfig(PatchConfig):
    """How fp8_linear decides, and how it scales."""

    scaling: Kind = "delayed"
    """`delayed` takes a tensor's scale from the steps before, `current` from the tensor, which is then read twice."""
    gradients: GradientFormat = "e5m2"
    """`e5m2` has 5 bits of exponent, `e4m3` 3 bits of mantissa."""
    leave: tuple[str, ...] = ()
    """Patterns of paths to be left in 16 bits."""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("scaling", self.scaling, get_args(Kind)),
            ("gradients", self.gradients, get_args(GradientFormat)),
        ):
            if value not in known:
                raise ConfigError(f"optimizations.fp8_linear.{name} is '{value}'; {nearest(value, known)}")


class FP8Linears(PatchCallback):
    """Runs linear layers by FP8 products in training: `Trainer(callbacks=[FP8Linears()])`.

    Acts before the optimizer is made. Scales are kept in the Trainer's checkpoints, so that a resumed run goes on as it
    would have; the model's state dict stays as it is. `undo()` puts the old modules back.

    Args:
        scaling: see `Scaling`.
        leave: patterns of paths to be left in 16 bits.

    Raises:
        OptimizationError: at `setup`, when the model has no such layer.
    """

    def __init__(self, scaling: Scaling | None = None, leave: tuple[str, ...] = ()) -> None:
        super().__init__(FP8Patches(scaling or Scaling(), leave))

    def state_dict(self) -> dict[str, Any]:
        """Return every module's scales, by path."""
        states = {path: module.scale_state() for path, module in self._modules().items()}
        return {path: state for path, state in states.items() if state is not None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the modules their scales."""
        modules = self._modules()
        for path, values in state_dict.items():
            if path in modules:
                modules[path].load_scale_state(values)

    def _modules(self) -> dict[str, HasScales]:
        found = {}
        for surgery in self._surgeries:
            for change in self.changes:
                module = surgery.model.get_submodule(change.path)
                if isinstance(module, HasScales):
                    found[change.path] = module
        return found


class FP8LinearOptimization(PatchOptimization[FP8LinearConfig]):
    """The plan's door."""

    name: ClassVar[str] = "fp8_linear"
    summary: ClassVar[str] = "matrix products of linear layers in 8-bit floating point, casts fused with what is beside"
    config_class: ClassVar[type[Any]] = FP8LinearConfig
    grade: ClassVar[Grade] = "same quality"
    before: ClassVar[frozenset[str]] = frozenset({"gemm_gelu", "layer_norm_dropout"})

    def make_callback(self) -> FP8Linears:
        """Return the callback."""
        config = self.config
        return FP8Linears(Scaling(config.scaling, config.gradients), tuple(config.leave))

    def check(self, context: Context) -> Verdict:
        """Refuse hardware without FP8, and runs in full precision, before anything is measured."""
        hardware, (major, minor) = context.hardware, OLDEST_CAPABILITY
        if hardware.capability is None or hardware.capability < OLDEST_CAPABILITY:
            has = "no CUDA device" if hardware.capability is None else "{}.{}".format(*hardware.capability)
            return Refuses(
                f"FP8 products need an NVIDIA GPU of compute capability {major}.{minor} (Ada, Hopper) or later; "
                f"{hardware.name} is {has}"
            )
        if context.precision not in PRECISIONS and "precision" not in context.asked_for:
            return Refuses(
                f"trainer.precision={context.precision} keeps activations in 32 bits; set it to bf16-mixed, between "
                "whose 16 bits FP8's are"
            )
        return super().check(context)
