"""The graph step in real fits on the CPU gives what plain Lightning does, by a stand-in that runs the step again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from graph_fits import Kept, OptimizerMaker, Small, adamw, assert_same_state, batches, fit, same_start, sgd
from graph_schedules import step_lr
from lightning.pytorch.loggers import CSVLogger

from fasttrain.callbacks import CUDAGraphStep


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
    for name, module, graph in (
        ("ours", ours, CUDAGraphStep(stand_in=True, short_path=short_path)),
        ("plain", plain, None),
    ):
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
    assert graph.step is None
    assert graph.changes == []
    assert graph.pool.hits == 0


def test_a_fit_without_its_optimizer_in_the_graph() -> None:
    ours, plain = same_start(lambda: Small(adamw, one_cycle))
    graph = CUDAGraphStep(stand_in=True, scope="fwd_bwd")
    options: dict[str, Any] = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}
    assert_same_state(fit(ours, batches(11), graph, **options), fit(plain, batches(11), **options))
    assert graph.pool.hits > 10


@pytest.mark.parametrize("options", [{"scope": "fwd_bwd"}, {"keep_gradients": True}], ids=str)
def test_gradients_that_stay_after_the_step(options: dict[str, Any]) -> None:
    class Norms(pl.Callback):
        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_train_batch_end(
            self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            self.seen.append(sum(float(p.grad.norm()) for p in pl_module.parameters()))

    ours, plain = same_start(lambda: Small(adamw, step_lr))
    graph, norms, expected = CUDAGraphStep(stand_in=True, **options), Norms(), Norms()
    data = batches(12, rows=(6, 6, 5))
    ours_trainer = fit(ours, data, graph, callbacks=[norms])
    assert_same_state(ours_trainer, fit(plain, data, callbacks=[expected]))
    assert norms.seen == expected.seen
    assert graph.pool.hits > 10
    assert not graph.step


def test_clipping_by_value() -> None:
    ours, plain = same_start(Small)
    options: dict[str, Any] = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    graph = CUDAGraphStep(stand_in=True)
    assert_same_state(fit(ours, batches(12), graph, **options), fit(plain, batches(12), **options))
    assert graph.pool.hits > 10


def test_a_plateau_scheduler_steps_on_what_was_logged() -> None:
    def plateau(optimizer: torch.optim.Optimizer) -> Any:
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0, factor=0.5)
        return {"scheduler": scheduler, "monitor": "mean_loss"}

    ours, plain = same_start(lambda: Small(schedule=plateau))
    graph, kept, expected = CUDAGraphStep(stand_in=True), Kept(), Kept()
    ours_trainer = fit(ours, batches(8), graph, callbacks=[kept], max_epochs=5)
    assert_same_state(ours_trainer, fit(plain, batches(8), callbacks=[expected], max_epochs=5))
    assert kept.rates == expected.rates
    assert len(set(kept.rates)) > 2, "the learning rate was reduced"
    assert graph.pool.captures == 1
