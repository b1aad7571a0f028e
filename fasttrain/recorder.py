"""Counts samples and seconds while a run goes on, and checks that the plan's optimizations really acted."""

import time
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl

from fasttrain.batches import tensors_in
from fasttrain.clock import PARTS, RunClock
from fasttrain.errors import OptimizationError
from fasttrain.plan import Plan
from fasttrain.trainer import logging_interval, logging_step

SampleCounter = Callable[[Any, int], int]


@runtime_checkable
class CountsSamples(Protocol):
    """A module whose batches hold another number of samples than their first tensor has rows."""

    def samples_in(self, batch: Any) -> int:
        """Return the number of samples in a batch."""
        ...


class RunRecorder(pl.Callback):
    """Counts samples, wall seconds and where they went, over all parts of a run that was resumed.

    Args:
        plan: its optimizations are asked once training has begun what they changed.
        clock: the Trainer's profiler.
        started: `time.perf_counter()` of the run's begin.
        on_plan_applied: called with the plan's record when the changes are known.
    """

    def __init__(
        self, plan: Plan, clock: RunClock, started: float, on_plan_applied: Callable[[dict[str, Any]], None]
    ) -> None:
        self.plan, self.clock, self.started, self.on_plan_applied = plan, clock, started, on_plan_applied
        self.samples = 0
        self.start_up_seconds: float | None = None
        self.throughput: float | None = None
        """Samples a second over the last logging interval, evaluation and checkpoints left out."""
        self._count: SampleCounter = lambda batch, before: before + samples_in(batch)
        self._earlier: dict[str, float] = {}
        self._window: tuple[int, float, float] | None = None  # samples, now, seconds spent outside of training
        self._window_step = 0

    @property
    def seconds(self) -> float:
        """Wall seconds since the run began, those before a resume included."""
        return self._earlier.get("seconds", 0.0) + time.perf_counter() - self.started

    @property
    def training_began(self) -> bool:
        """Whether every optimization has acted and the first step was about to be taken."""
        return self.start_up_seconds is not None

    def breakdown(self) -> dict[str, float]:
        """Return the seconds of each part; `other` is what none of them holds: hooks, loggers, teardown."""
        parts = {part: self._earlier.get(part, 0.0) + self.clock.seconds[part] for part in PARTS}
        parts["start_up"] = self._earlier.get("start_up", 0.0) + (self.start_up_seconds or 0.0)
        parts["other"] = max(0.0, self.seconds - sum(parts.values()))
        return parts

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ask who counts samples, and every optimization what it changed.

        Raises:
            OptimizationError: one that applies has changed nothing.
        """
        self._count = sample_counter(trainer, pl_module)
        for optimization in self.plan.applying:
            if not optimization.applied():
                raise OptimizationError(
                    f"optimization '{optimization.name}' was to be applied and changed nothing; a speed-up would be "
                    f"credited to it wrongly. Leave it out: optimizations.{optimization.name}=false."
                )
        self.on_plan_applied(self.plan.record(with_changes=True))
        self.start_up_seconds = time.perf_counter() - self.started

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count; at the logging interval, log the throughput since the last time."""
        self.samples = self._count(batch, self.samples)
        # While gradients are accumulated several batches end at one step.
        if trainer.global_step != self._window_step and trainer.global_step % logging_interval(trainer) == 0:
            self._window_step = trainer.global_step
            self._log_throughput(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Everything until the end of validation is evaluation."""
        self.clock.begin_evaluation()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Back to training."""
        self.clock.end_evaluation()

    def state_dict(self) -> dict[str, Any]:
        """Return the counts for the checkpoint."""
        return {"samples": self.samples, "seconds": self.seconds, "breakdown": self.breakdown()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting from there."""
        self.samples = int(state_dict["samples"])
        self._earlier = {"seconds": state_dict["seconds"], **state_dict["breakdown"]}

    def _log_throughput(self, trainer: pl.Trainer) -> None:
        now = time.perf_counter()
        outside = self.clock.seconds["evaluation"] + self.clock.seconds["checkpoint"]
        if self._window is not None:
            samples, then, outside_then = self._window
            seconds = (now - then) - (outside - outside_then)
            if seconds > 0 and self.samples > samples:
                self.throughput = (self.samples - samples) / seconds
                step = logging_step(trainer)
                for logger in trainer.loggers:
                    logger.log_metrics({"samples_per_second": self.throughput, "epoch": trainer.current_epoch}, step)
        self._window = (self.samples, now, outside)


def sample_counter(trainer: pl.Trainer, module: pl.LightningModule) -> SampleCounter:
    """Return what says how many samples all processes have been given, after a batch and so many before it.

    A data module with `sequences_seen` knows by itself: how many sequences the packed rows of a batch hold, its tensors
    on the device tell only to who waits. Else the module may say what is in a batch (`CountsSamples`), or it is the
    rows of its first tensor.
    """
    data: Any = getattr(trainer, "datamodule", None)
    if hasattr(data, "sequences_seen"):
        return lambda batch, before: int(data.sequences_seen)
    count = module.samples_in if isinstance(module, CountsSamples) else samples_in
    return lambda batch, before: before + count(batch) * trainer.world_size


def samples_in(batch: Any) -> int:
    """Return the rows of the first tensor found in a batch; 1 for a batch without tensors."""
    tensor = next(tensors_in(batch), None)
    return int(tensor.shape[0]) if tensor is not None and tensor.dim() else 1
