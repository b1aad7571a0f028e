"""When torch's fused or foreach optimizers apply, and their two doors: a Lightning callback and the plan's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import lightning.pytorch as pl

from fasttrain.callback_door import ActingCallback, CallbackOptimization
from fasttrain.callbacks.optimizers.implementation import Implementation, sparse_embedding, use, why_not
from fasttrain.callbacks.optimizers.probe import OptimizerProbe
from fasttrain.errors import ConfigError, OptimizationError
from fasttrain.measure import ms_text
from fasttrain.optimization import Applies, Change, Context, Refuses, Stage, Verdict


@dataclass(frozen=True)
class FusedOptimizersConfig:
    """Which of torch's implementations may be chosen, and how."""

    fused: bool = True
    """Consider torch's fused kernels, which read and write every tensor once."""
    foreach: bool = True
    """Consider torch's foreach kernels, one per operation for many tensors."""
    measure: bool = True
    """Time the optimizer's step by each implementation first, and refuse where none is faster."""
    least_gain: float = 0.1
    """The share of the optimizer step's time that must be saved; below it the difference is noise."""

    def __post_init__(self) -> None:
        if not (self.fused or self.foreach):
            raise ConfigError(
                "optimizations.optimizers: fused and foreach are both false, which leaves nothing to choose; allow "
                "one, or set optimizations.optimizers=false."
            )

    @property
    def allowed(self) -> list[Implementation]:
        """The implementations to consider, the one that is usually faster first."""
        both: list[tuple[Implementation, bool]] = [("fused", self.fused), ("foreach", self.foreach)]
        return [name for name, is_allowed in both if is_allowed]


class FusedOptimizers(ActingCallback):
    """Steps SGD, Adam and AdamW by torch's fused kernels: `Trainer(callbacks=[FusedOptimizers()])`.

    Acts when the fit starts, on the optimizers that `configure_optimizers` returned. Those for which an implementation
    was chosen by their maker stay as they are. Checkpoints are those of the plain optimizer.

    Args:
        implementation: `fused` or `foreach`.

    Raises:
        OptimizationError: at the fit's start, when there is no optimizer that can have it.
    """

    def __init__(self, implementation: Implementation = "fused") -> None:
        super().__init__()
        self.implementation = implementation
        self._undo: list[Callable[[], None]] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set the implementation. State that is restored after this comes under it too."""
        reasons: list[str] = []
        self.changes = []
        for index, optimizer in enumerate(trainer.optimizers):
            reason = why_not_here(pl_module, optimizer, self.implementation)
            if reason is not None:
                reasons.append(reason)
                continue
            self._undo.append(use(optimizer, self.implementation))
            what = f"{type(optimizer).__name__}, {self.implementation}"
            self.changes.append(Change(f"trainer.optimizers[{index}]", what, len(optimizer.param_groups)))
        if not self.changes:
            why = reasons[0] if reasons else f"{type(pl_module).__name__} has no optimizer"
            raise OptimizationError(f"optimizers: no step can be {self.implementation} here: {why}; leave it out.")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the optimizers back as they were made."""
        while self._undo:
            self._undo.pop()()


class FusedOptimizersOptimization(CallbackOptimization[FusedOptimizersConfig, FusedOptimizers]):
    """The plan's door."""

    name: ClassVar[str] = "optimizers"
    summary: ClassVar[str] = "SGD, Adam and AdamW stepped by torch's fused kernels, where that measures faster"
    config_class: ClassVar[type[Any]] = FusedOptimizersConfig
    stage: ClassVar[Stage] = Stage.CALLBACK
    grade = "same numbers"

    def make_callback(self) -> FusedOptimizers:
        """Return the callback, for the implementation that is usually fastest; `check` may choose another."""
        return FusedOptimizers(self.config.allowed[0])

    def check(self, context: Context) -> Verdict:
        """Refuse where no optimizer can have another implementation, or where none measures faster."""
        module = context.module
        if type(module).configure_optimizers is pl.LightningModule.configure_optimizers:
            return Refuses(f"{type(module).__name__} has no configure_optimizers, so there is no optimizer to speed up")
        if not self.config.measure:
            return Applies(f"{self.config.allowed[0]}; not measured, as asked")
        probe = OptimizerProbe(module, context.hardware.device)
        try:
            made = probe.optimizers()
            possible, reason = self._possible(module, made)
            if not possible:
                return Refuses(reason)
            times = {name: timing.median_ms for name, timing in probe.compare_implementations(possible).items()}
        except OptimizationError as error:
            return Refuses(f"{error}; set optimizations.optimizers.measure=false to use it unmeasured")
        return self._choose(possible, times)

    def _possible(self, module: pl.LightningModule, made: Sequence[Any]) -> tuple[list[Implementation], str]:
        possible, reasons = [], []
        for implementation in self.config.allowed:
            found = [why_not_here(module, optimizer, implementation) for optimizer in made]
            reasons += [reason for reason in found if reason is not None]
            if None in found:
                possible.append(implementation)
        return possible, reasons[0] if reasons else f"{type(module).__name__}'s configure_optimizers returns none"

    def _choose(self, possible: Sequence[Implementation], times: dict[str, float]) -> Verdict:
        best = min(possible, key=lambda name: times[name])
        gain = 1 - times[best] / times["plain"]
        words = ", ".join(f"{name} {ms_text(ms)} ms" for name, ms in times.items())
        if gain < self.config.least_gain:
            wanted = f"at least {self.config.least_gain:+.0%} wanted"
            return Refuses(f"not faster here: {words} a step of the optimizer ({gain:+.0%}, {wanted})")
        self.callback.implementation = best
        return Applies(f"{best}; measured {words} a step of the optimizer")


def why_not_here(module: pl.LightningModule, optimizer: Any, implementation: Implementation) -> str | None:
    """Return a sentence's end with the reason why an optimizer of this module can't get an implementation, or None."""
    path = sparse_embedding(module)
    if path is not None and implementation == "fused":
        return f"the embedding '{path}' has sparse gradients, which no fused step takes"
    return why_not(optimizer, implementation)
