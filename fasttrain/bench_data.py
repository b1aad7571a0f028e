"""Whether a run waits for its data: the loader alone, the step alone, and both together, in one fit of a recipe."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader, move_data_to_device

from fasttrain.config import Resolved
from fasttrain.errors import ConfigError, DataError
from fasttrain.fetching import Fetched, LoaderInBetween, stand_between
from fasttrain.measure import Row, make_row
from fasttrain.measured_fit import fit_to_measure, made_ahead, new_recorder
from fasttrain.plan import Catalogue
from fasttrain.quiet import quiet_libraries
from fasttrain.recorder import CountsSamples, samples_in
from fasttrain.run import Prepared, prepare
from fasttrain.step_clock import StepClock, StepTime
from fasttrain.trainer import stop_now, train_without_end

WARM_UP = 15
"""Steps before the first that counts: captures, compilations and the choice of convolution algorithms are in them."""

SETTLING = 5
"""Steps between the measurement of the loader and the first of the run that counts."""

WINDOWS = 10
"""Loaders deliver in bursts, so rates are those of several steps; so many parts give the spread."""

LITTLE = 0.02
"""A share of a run's time that is not worth a user's time."""


@dataclass(frozen=True)
class Rates:
    """Samples a second, of consecutive parts of a measurement and of the whole."""

    whole: float
    parts: Sequence[float]

    @classmethod
    def of(cls, samples: Sequence[int], seconds: Sequence[float]) -> "Rates":
        """Divide batches into parts."""
        parts = [sum(samples[part]) / sum(seconds[part]) for part in _windows(len(samples))]
        return cls(sum(samples) / sum(seconds), parts)


@dataclass(frozen=True)
class DataBench:
    """What was measured."""

    loader: Rates
    step: Rates
    run: Rates
    steps: Sequence[StepTime]
    """Of the run."""

    @property
    def data_wait(self) -> float:
        """The share of the run's time in which it waited for the loader."""
        return _share(self.steps, "data_wait")

    @property
    def host_to_device(self) -> float:
        """The share in which it waited for its batches' copies."""
        return _share(self.steps, "host_to_device")

    def verdict(self, cure_of_copies: str) -> str:
        """Return in a sentence which is the bottleneck, and what would help.

        Args:
            cure_of_copies: what moves batches beside the step, as words that follow "would".
        """
        loader, step = f"{self.loader.whole:,.0f}", f"{self.step.whole:,.0f}"
        wait, copies = f"{self.data_wait:.1%}", f"{self.host_to_device:.1%}"
        if self.data_wait > LITTLE and self.loader.whole < self.step.whole:
            return (
                f"The loader is the bottleneck: alone it gives {loader} samples/s and the step takes {step}, so {wait} "
                "of the run is waiting for data; more loader processes, a cache, smaller images or a GPU loader would "
                "help."
            )
        if self.data_wait > LITTLE:
            return (
                f"The run waits for data {wait} of its time although the loader alone ({loader} samples/s) is faster "
                f"than the step ({step}): it delivers unevenly, or has fewer cores beside the step; more prefetching "
                "or other numbers of loader processes and threads would help."
            )
        if self.host_to_device > LITTLE:
            return (
                f"Copies to the device are {copies} of the run's time, waiting for data {wait}; {cure_of_copies} would "
                "hide them behind the step."
            )
        if self.run.whole < 0.9 * self.step.whole:
            return (
                f"The run ({self.run.whole:,.0f} samples/s) is slower than its step ({step}) without waiting for data "
                f"({wait}): copies into a captured step, hooks, logging or cores that the loader takes from the step."
            )
        return (
            f"The step is the bottleneck: {wait} of the run is waiting for data, and the loader alone gives {loader} "
            f"samples/s where the step takes {step}; only a faster step would help."
        )

    def rows(self, recipe: str, variant: str, note: str) -> Iterator[Row]:
        """Yield the rows of the rates and shares."""
        for what, rates in (("loader_alone", self.loader), ("step_alone", self.step), ("run", self.run)):
            yield make_row(recipe, f"data_{what}", variant, "samples_per_second", "samples/s", rates.parts, note)
        for name in ("data_wait", "host_to_device"):
            parts = [100 * _share(self.steps[part], name) for part in _windows(len(self.steps))]
            yield make_row(recipe, "data_run", variant, f"{name}_percent", "%", parts, f"of step time; {note}")


def bench_data(resolved: Resolved, catalogue: Catalogue, steps: int) -> tuple[DataBench, Prepared]:
    """Measure a recipe as it is configured, on one device, without evaluation and without writing anything.

    Args:
        resolved: the configuration.
        catalogue: the optimizations that may be asked for.
        steps: batches of each of the three measurements.

    Raises:
        ConfigError: `steps` is too small for a spread.
        DataError: the training loader is empty.
    """
    if steps < WINDOWS:
        raise ConfigError(f"--steps is {steps}; a median with its spread takes at least {WINDOWS}.")
    with quiet_libraries():
        prepared = prepare(resolved, catalogue)
        clock = StepClock(prepared.context.hardware.device)
        phases = Phases(WARM_UP + steps + 1, steps)
        fit_to_measure(prepared, new_recorder(prepared, clock), clock, [_Conductor(phases, clock, steps)])
    if not phases.seconds:
        raise DataError(f"the training loader of {type(prepared.recipe.data).__name__} gave no batch to measure with.")
    alone = clock.steps(WARM_UP, phases.repeats - 1)  # in the fetching of the last one the loader is measured
    first = phases.repeats + SETTLING
    together = clock.steps(first, first + steps)
    batch = phases.samples_of_step
    return (
        DataBench(
            Rates.of(phases.samples, phases.seconds),
            Rates.of([batch] * len(alone), [step.whole for step in alone]),
            Rates.of([batch] * len(together), [step.whole for step in together]),
            together,
        ),
        prepared,
    )


@dataclass
class Phases:
    """First one batch again and again, then the loader is measured, then everything is as in any run."""

    repeats: int
    """Times that the first batch is handed out."""
    pulls: int
    """Batches of the loader's own measurement."""
    samples_of_step: int = 0
    samples: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class PhasedLoader(LoaderInBetween):
    """Goes through the phases, whatever epochs Lightning counts meanwhile.

    Args:
        inner: the training loader, with whatever an optimization has put before it.
        phases: the plan, which takes the measurement.
        device: where the repeated batch is put once.
        count: tells the number of samples in a batch.
    """

    def __init__(
        self, inner: CombinedLoader, phases: Phases, device: torch.device, count: Callable[[Any], int]
    ) -> None:
        super().__init__(inner)
        self._phases, self._device, self._count = phases, device, count
        self._handed_out = 0
        self._kept: Fetched | None = None

    def __iter__(self) -> "PhasedLoader":
        if not 0 < self._handed_out < self._phases.repeats:  # else the loader goes on filling its queue
            super().__iter__()
        return self

    def __next__(self) -> Fetched:
        self._handed_out += 1
        if self._handed_out <= self._phases.repeats:
            if self._kept is None:
                batch, number, loader = super().__next__()
                self._phases.samples_of_step = self._count(batch)
                self._kept = (move_data_to_device(batch, self._device), number, loader)
            return self._kept
        if not self._phases.seconds:
            self._kept = None
            self._measure()
        return self._pull()

    def _measure(self) -> None:
        # What was made while the step was measured has cost nothing that could be measured now.
        for _ in range(made_ahead(self.inner)):
            self._pull()
        for _ in range(self._phases.pulls):
            begin = time.perf_counter()
            batch = self._pull()[0]
            self._phases.seconds.append(time.perf_counter() - begin)
            self._phases.samples.append(self._count(batch))

    def _pull(self) -> Fetched:
        try:
            return super().__next__()
        except StopIteration:  # an epoch's end; the next begins
            super().__iter__()
            return super().__next__()


class _Conductor(pl.Callback):
    """Puts the phases before the loader, and ends the fit when the last one is over."""

    def __init__(self, phases: Phases, clock: StepClock, steps: int) -> None:
        self.phases, self.clock = phases, clock
        self.last = phases.repeats + SETTLING + steps + 2

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        train_without_end(trainer)
        self._stand_between(trainer, pl_module)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stand_between(trainer, pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        if self.clock.begun >= self.last:
            stop_now(trainer)

    def _stand_between(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        count = module.samples_in if isinstance(module, CountsSamples) else samples_in
        device = trainer.strategy.root_device
        found = stand_between(
            trainer, PhasedLoader, lambda inner, kept_back: PhasedLoader(inner, self.phases, device, count)
        )
        if found is None:
            raise ConfigError(
                f"{type(module).__name__}.training_step takes the loader's iterator itself, so what it waits for can't "
                "be told from what it does."
            )


def _windows(count: int) -> list[slice]:
    parts = min(WINDOWS, count)
    return [slice(count * part // parts, count * (part + 1) // parts) for part in range(parts)]


def _share(steps: Sequence[StepTime], name: str) -> float:
    return float(sum(getattr(step, name) for step in steps) / sum(step.whole for step in steps))
