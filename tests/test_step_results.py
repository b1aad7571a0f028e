"""What replayed steps log, against what Lightning's own store of results makes of the same steps."""

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from graph_fits import Batches, Small, assert_same_state, batches, fit, same_start, sgd
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassRecall

from fasttrain.callbacks import CUDAGraphStep
from fasttrain.step_results import StepResults

Say = Callable[[Any, Any, Tensor], None]
"""What a step logs: of the module, the batch and the loss."""


class Logs(Small):
    """Logs what it is told to."""

    def __init__(self, say: Say) -> None:
        super().__init__()
        self.say = say

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.say(self, batch, loss)
        return loss


class Rows(Logger):
    """Keeps every row."""

    name, version = "rows", ""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))


class Reads(pl.Callback):
    """Reads all metrics at some steps, and what the store holds for the end of the epoch."""

    def __init__(self, at: Callable[[int], bool]) -> None:
        self.at = at
        self.read: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.at(batch_idx):
            metrics = (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
            self.read.append([{key: float(value) for key, value in each.items()} for each in metrics])

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        results: Any = trainer.fit_loop.epoch_loop._results
        self.read.append({key: metric.value for key, metric in results.items() if metric.is_tensor})
        self.read.append({key: metric.value.dtype for key, metric in results.items() if metric.is_tensor})


def every(count: int) -> Callable[[int], bool]:
    return lambda batch_idx: (batch_idx + 1) % count == 0


def never(batch_idx: int) -> bool:
    return False


def logged(
    make: Callable[[], pl.LightningModule],
    data: Batches | None = None,
    at: Callable[[int], bool] = never,
    callbacks: Callable[[], list[pl.Callback]] = list,
    **options: Any,
) -> None:
    """Check that two fits, one of them replayed, log and show the same."""
    told, trainers = [], []
    graph = CUDAGraphStep(stand_in=True)
    for module, step in zip(same_start(make), (graph, None), strict=True):
        rows, reads = Rows(), Reads(at)
        settings = {"max_epochs": 3, "log_every_n_steps": 3, **options}
        loader = batches(10, rows=(6, 6, 6, 6, 6, 6, 6, 6, 6, 3)) if data is None else data
        trainers.append(fit(module, loader, step, callbacks=[*callbacks(), reads], logger=rows, **settings))
        in_the_end = {key: float(value) for key, value in trainers[-1].callback_metrics.items()}
        told.append((rows.rows, reads.read, in_the_end))
    assert graph.pool.hits >= 10, graph.notes
    for mine, expected in zip(told[0][0], told[1][0], strict=True):
        assert mine == expected
    for mine, expected in zip(told[0][1], told[1][1], strict=True):
        assert mine == expected
    assert told[0][2] == told[1][2]
    assert len(told[1][0]) >= 3
    assert_same_state(*trainers)


@pytest.mark.parametrize("at", [never, every(1), every(4)], ids=["never", "always", "sometimes"])
@pytest.mark.parametrize("on", [(True, False), (False, True), (True, True)], ids=["step", "epoch", "both"])
@pytest.mark.parametrize("reduce_fx", ["mean", "max", "min", "sum", torch.sum, max])
def test_reductions(reduce_fx: Any, on: tuple[bool, bool], at: Callable[[int], bool]) -> None:
    def say(module: Any, batch: Any, loss: Tensor) -> None:
        module.log("value", loss, on_step=on[0], on_epoch=on[1], reduce_fx=reduce_fx, prog_bar=True)
        module.log("other", -loss, logger=False)

    logged(lambda: Logs(say), at=at)
