"""A fit's steady state: what each step took, window by window, while everything is on that a run has on."""

import time
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl

from fasttrain.measure import synchronize
from fasttrain.step_clock import StepClock, StepTime
from fasttrain.trainer import stop_now


class StopAfter(pl.Callback):
    """Ends the first epoch of a fit after so many batches, without the evaluation that would come then."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop."""
        if batch_idx + 1 >= self.batches:
            stop_now(trainer)


def windows_of(clock: StepClock, first: int, steps: int, window: int) -> list[Sequence[StepTime]]:
    """Return the steps from `first` on in whole windows; those of which the next step began."""
    found = clock.steps(first, first + steps)
    return [found[at : at + window] for at in range(0, len(found) - window + 1, window)]


def samples_per_second(windows: Sequence[Sequence[StepTime]], batch_size: int) -> list[float]:
    """Return the rate of each window."""
    return [len(window) * batch_size / sum(step.whole for step in window) for window in windows]


def data_wait_fraction(windows: Sequence[Sequence[StepTime]]) -> list[float]:
    """Return the share of each window's time in which nothing ran because the next batch was not there."""
    return [sum(step.data_wait for step in window) / sum(step.whole for step in window) for window in windows]


class Started(pl.Callback):
    """Notes when a fit has got going: everything is compiled, captured and warm after its first few batches.

    Args:
        batches: of the first epoch that belong to the start.
    """

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.at: float | None = None
        """`time.time()` when the last of them was done, on the device too; None before."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at the clock."""
        if self.at is None and batch_idx + 1 >= self.batches:
            synchronize(pl_module.device)
            self.at = time.time()
