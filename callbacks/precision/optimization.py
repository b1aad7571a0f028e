"""When another precision applies, and the plan's door to it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fasttrain.callbacks.precision.choice import FP32, fastest_precision
from fasttrain.errors import ConfigError, OptimizationError, nearest
from fasttrain.measure import AUTOCAST, ms_text
from fasttrain.optimization import Applies, Attachment, Change, Context, Optimization, Refuses, Stage, Verdict


@dataclass(frozen=True)
class PrecisionConfig:
    """Which precisions may be chosen."""

    allowed: list[str] = field(default_factory=lambda: ["bf16-mixed", "16-mixed"])
    """Under Lightning's names. bf16-mixed comes first: it needs no loss scaling."""
    least_gain: float = 0.05
    """The share of step time that must be saved to leave fp32; and that fp16 must save over bf16."""

    def __post_init__(self) -> None:
        for name in self.allowed:
            if name not in AUTOCAST:
                raise ConfigError(
                    f"optimizations.precision.allowed: '{name}' is no mixed precision; {nearest(name, AUTOCAST)}"
                )


class PrecisionOptimization(Optimization[PrecisionConfig]):
    """Sets the Trainer's precision to the one whose training step measures fastest on this device."""

    name: ClassVar[str] = "precision"
    summary: ClassVar[str] = "the mixed precision whose training step measures fastest on this device"
    config_class: ClassVar[type[Any]] = PrecisionConfig
    stage: ClassVar[Stage] = Stage.PLUGIN
    grade = "same quality"

    def __init__(self, config: PrecisionConfig) -> None:
        super().__init__(config)
        self.chosen: str | None = None

    def check(self, context: Context) -> Verdict:
        """Measure, unless the run names a precision itself."""
        if context.precision != FP32.name:
            return Refuses(f"trainer.precision={context.precision} is set by the configuration already")
        if context.example is None:
            return Refuses("there is no batch to measure with; set trainer.precision instead")
        try:
            batch = context.example()
            timed = fastest_precision(context.module, batch, context.hardware, self.config.allowed)
        except OptimizationError as error:
            return Refuses(f"{error}; set trainer.precision instead")
        times = {candidate.name: timing.median_ms for candidate, timing in timed}
        words = ", ".join(f"{name} {ms_text(ms)} ms" for name, ms in times.items())
        best = self._choose(times)
        if best == FP32.name:
            return Refuses(f"fp32 is the fastest here, or as fast: {words} a step")
        self.chosen = best
        return Applies(f"{best}; measured {words} a step")

    def attach(self, context: Context) -> Attachment:
        """Set the Trainer's precision."""
        return Attachment(trainer_options={"precision": self.chosen})

    def applied(self) -> Sequence[Change]:
        """Return the Trainer's precision."""
        return [Change("trainer.precision", self.chosen)] if self.chosen else []

    def _choose(self, times: dict[str, float]) -> str:
        best = FP32.name
        for name in self.config.allowed:
            if name in times and times[name] < times[best] * (1 - self.config.least_gain):
                best = name
        return best
