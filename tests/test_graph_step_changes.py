"""Where something changes: what callbacks do is honoured, and steps that a replay can't repeat run eagerly."""

import itertools
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from graph_fits import Small, assert_same_state, batches, fit, same_start, sgd
from torch import Tensor, nn

from fasttrain.callbacks import CUDAGraphStep
from fasttrain.errors import OptimizationError


def every_step(optimizer: torch.optim.Optimizer) -> Any:
    return {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5), "interval": "step"}


class Unfreezing(pl.Callback):
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.net[0].requires_grad_(trainer.current_epoch >= 1)


class WeightDecayOnTheWay(pl.Callback):
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 7:
            trainer.optimizers[0].param_groups[0]["weight_decay"] *= 2


class RateOnTheWay(pl.Callback):
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % 3 == 0:
            trainer.optimizers[0].param_groups[0]["lr"] *= 0.5


class DropoutOnTheWay(pl.Callback):
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.net[3].p = 0.1 * trainer.current_epoch


class NewGroup(pl.Callback):
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            trainer.optimizers[0].add_param_group({"params": [pl_module.extra], "lr": 2**-7})


class WithExtra(Small):
    """Has a parameter that the optimizer does not know at first."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.extra = nn.Parameter(torch.zeros(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + (self.extra - 1).square().sum()

    def configure_optimizers(self) -> Any:
        return sgd(self.net.parameters())


@pytest.mark.parametrize(
    ("callback", "said"),
    [
        (Unfreezing, "net.0.weight was unfrozen"),
        (WeightDecayOnTheWay, "the optimizer changed weight_decay"),
        (RateOnTheWay, ""),
        (DropoutOnTheWay, "the attribute net.3.p changed from 0.0 to 0.1"),
        (NewGroup, "extra was given to the optimizer"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_what_a_callback_changes_is_honoured(callback: type[pl.Callback], said: str) -> None:
    ours, plain = same_start(WithExtra if callback is NewGroup else Small)
    graph = CUDAGraphStep(stand_in=True)
    ours_trainer = fit(ours, batches(12), graph, callbacks=[callback()], max_epochs=3)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if callback is WeightDecayOnTheWay else {}
    assert_same_state(ours_trainer, fit(plain, batches(12), callbacks=[callback()], max_epochs=3), **tolerance)
    assert graph.pool.hits > 10
    assert any(said.lower() in note.lower() for note in graph.notes) if said else graph.pool.captures == 1, graph.notes


class Counting(Small):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        return super().training_step(batch, batch_idx)


class Drawing(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        import random

        return super().training_step(batch, batch_idx) * random.choice([1.0, 2.0])


TEMPERATURES = itertools.count()


class LoggingNumbers(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("temperature", float(next(TEMPERATURES)))
        return super().training_step(batch, batch_idx)


class LookingAtTheIndex(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx % 2 else 2 * loss


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (Counting, "calls"),
        (Drawing, "random"),
        (LoggingNumbers, r"self.log\('temperature'\) is given a Python number that changes"),
        (LookingAtTheIndex, "batch_idx"),
    ],
)
def test_a_step_that_a_replay_could_not_repeat_runs_eagerly(module: type[Small], sentence: str) -> None:
    ours, plain = same_start(lambda: module() if module is Counting else module(schedule=every_step))
    # Where its code tells, it is not even tried; what the code does not tell is seen in the first steps.
    trusted = ("LoggingNumbers.training_step",)
    graph = CUDAGraphStep(stand_in=True, trusted=trusted)
    with pytest.warns(UserWarning, match=f"steps run eagerly, since .*{sentence}"):
        ours_trainer = fit(ours, batches(12), graph)
    assert_same_state(ours_trainer, fit(plain, batches(12)))
    assert graph.pool.hits == 0
    with pytest.raises(OptimizationError, match=f"cuda_graph_step: .*{sentence}"):
        fit(module(), batches(12), CUDAGraphStep(stand_in=True, on_failure="error", trusted=trusted))
