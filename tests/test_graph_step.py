"""The graph step's bookkeeping in real fits on the CPU, through the stand-in that runs the captured function again."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from fasttrain.callbacks import CUDAGraphStep
from fasttrain.errors import OptimizationError
from graph_fits import Kept, OptimizerMaker, Small, adamw, assert_same_state, batches, fit, same_start, sgd


def step_lr(optimizer: torch.optim.Optimizer) -> Any:
    return {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5), "interval": "step"}


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=60)
    return {"scheduler": scheduler, "interval": "step"}


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("schedule", [step_lr, one_cycle])
@pytest.mark.parametrize("make", [sgd, adamw])
def test_a_fit_gives_the_same_weights_metrics_and_counts(
    make: OptimizerMaker, schedule: Callable[[Any], Any], clip: float | None, accumulate: int
) -> None:
    ours, plain = same_start(lambda: Small(make, schedule))
    options: dict[str, Any] = {"gradient_clip_val": clip, "accumulate_grad_batches": accumulate, "max_epochs": 3}
    data = batches(10, rows=(6, 6, 6, 6, 6, 6, 6, 6, 6, 3))  # a last partial batch, and a last short window
    graph, kept, expected = CUDAGraphStep(stand_in=True), Kept(), Kept()
    ours_trainer = fit(ours, data, graph, callbacks=[kept], **options)
    plain_trainer = fit(plain, data, callbacks=[expected], **options)
    assert graph.pool.hits > 5, graph.notes
    # A cycled momentum needs the update whose numbers are all on the device, which rounds in another order.
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if schedule is one_cycle else {}
    assert_same_state(ours_trainer, plain_trainer, **tolerance)
    assert kept.steps == expected.steps
    assert kept.rates == expected.rates
    assert kept.losses == pytest.approx(expected.losses, rel=1e-4 if tolerance else 0)
    for step, (mine, theirs) in enumerate(zip(kept.metrics, expected.metrics, strict=True)):
        assert mine == pytest.approx(theirs, rel=1e-4 if tolerance else 0), f"batch {step}"
    assert ours_trainer.global_step == plain_trainer.global_step


@pytest.mark.parametrize("short_path", [True, False])
def test_a_logger_gets_the_same_rows(tmp_path: Path, short_path: bool) -> None:
    ours, plain = same_start(Small)
    data = batches(9)
    rows = {}
    for name, module, graph in (("ours", ours, CUDAGraphStep(stand_in=True, short_path=short_path)), ("plain", plain, None)):
        logger = CSVLogger(tmp_path, name=name, version="")
        fit(module, data, graph, logger=logger, log_every_n_steps=2, validation=batches(2), max_epochs=3)
        rows[name] = (tmp_path / name / "metrics.csv").read_text()
    assert rows["ours"] == rows["plain"]


def test_dropout_follows_the_same_sequence() -> None:
    ours, plain = same_start(lambda: Small(dropout=0.5))
    graph = CUDAGraphStep(stand_in=True)
    assert_same_state(fit(ours, batches(12), graph), fit(plain, batches(12)))
    assert graph.pool.hits > 10


def test_without_a_gpu_it_says_so_and_changes_nothing() -> None:
    ours, plain = same_start(Small)
    graph = CUDAGraphStep()
    assert_same_state(fit(ours, batches(6), graph), fit(plain, batches(6)))
    assert graph.step is None and graph.changes == [] and graph.pool.hits == 0
