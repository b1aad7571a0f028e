"""What replayed steps log, against what Lightning's own store of results makes of the same steps."""

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from graph_fits import Batches, Small, assert_same_state, batches, fit, same_start
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassRecall

from fasttrain.callbacks import CUDAGraphStep
from fasttrain.errors import OptimizationError
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
def test_every_reduction_by_step_and_by_epoch(at: Callable[[int], bool]) -> None:
    reductions = {"mean": "mean", "max": "max", "min": "min", "sum": "sum", "torch": torch.sum, "python": max}

    def say(module: Any, batch: Any, loss: Tensor) -> None:
        for name, reduce_fx in reductions.items():
            module.log(f"{name} of steps", loss, on_step=True, on_epoch=False, reduce_fx=reduce_fx, prog_bar=True)
            module.log(f"{name} of epochs", -loss, on_step=False, on_epoch=True, reduce_fx=reduce_fx)
            module.log(name, loss, on_step=True, on_epoch=True, reduce_fx=reduce_fx, logger=False)

    logged(lambda: Logs(say), at=at)


def of_sizes(module: Any, batch: Any, loss: Tensor) -> None:
    module.log("inferred", loss, on_step=True, on_epoch=True)
    module.log("given", loss, on_epoch=True, batch_size=5)
    module.log("of a part", loss, on_epoch=True, batch_size=batch[0].shape[0] // 2)
    module.log("a tensor", loss, on_epoch=True, batch_size=(batch[1] > 0).sum())


def of_dtypes(module: Any, batch: Any, loss: Tensor) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool):
        module.log(f"{dtype}", (10 * loss).to(dtype), on_step=True, on_epoch=True)
        module.log(f"{dtype} of epochs", (10 * loss).to(dtype), on_step=False, on_epoch=True, reduce_fx="sum")
    module.log("one element", loss.reshape(1, 1))


def by_dict(module: Any, batch: Any, loss: Tensor) -> None:
    module.log_dict({"a": loss, "b": loss.square()}, on_step=True, on_epoch=True, prog_bar=True)
    module.log_dict({"first": batch[0][0, 0], "constant": 2.0, "whole": 3, "flag": True}, on_epoch=True)


def twice(module: Any, batch: Any, loss: Tensor) -> None:
    """A loop over heads that all log under one name; Lightning adds them all up and shows the last."""
    for head in range(3):
        module.log("head", loss + head, on_step=True, on_epoch=True)
        module.log("largest", loss - head, on_step=True, on_epoch=True, reduce_fx="max")


def changed_afterwards(module: Any, batch: Any, loss: Tensor) -> None:
    value = loss.detach().clone()
    module.log("value", value, on_step=True, on_epoch=True)
    value.zero_()


def with_the_index(module: Any, batch: Any, loss: Tensor) -> None:
    module.log("value", loss, on_epoch=True, add_dataloader_idx=False)
    module.log("other", loss, on_epoch=True, add_dataloader_idx=True, rank_zero_only=True)
    module.log("synced", loss, on_step=True, on_epoch=True, sync_dist=True)


def of_large_batches(module: Any, batch: Any, loss: Tensor) -> None:
    if batch[0].shape[0] > 4:
        module.log("large", loss, on_step=True, on_epoch=True)
    else:
        module.log("small", loss, on_step=True, on_epoch=True)
    module.log("all", loss, on_step=True, on_epoch=True)


@pytest.mark.parametrize("at", [never, every(2)], ids=["", "read"])
@pytest.mark.parametrize("say", [of_sizes, of_dtypes, by_dict, twice, changed_afterwards, with_the_index])
def test_arguments_of_log(say: Say, at: Callable[[int], bool]) -> None:
    logged(lambda: Logs(say), at=at)


@pytest.mark.parametrize("at", [never, every(1), every(3)], ids=["never", "always", "sometimes"])
@pytest.mark.parametrize("say", [of_sizes, of_large_batches])
def test_graphs_of_several_sizes_weigh_the_mean_right(say: Say, at: Callable[[int], bool]) -> None:
    logged(lambda: Logs(say), batches(24, rows=(6, 4, 4, 5)), at, log_every_n_steps=5)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_values_between_two_loggings(accumulate: int) -> None:
    """With accumulation a logger sees stepping batches only, and the epoch's mean all of them."""
    logged(lambda: Logs(of_sizes), batches(20), every(3), accumulate_grad_batches=accumulate, log_every_n_steps=2)


def test_an_epoch_is_validated_in_between() -> None:
    class Monitored(Logs):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    logged(lambda: Monitored(of_sizes), at=every(2), validation=batches(2, seed=4), val_check_interval=4)


class OfHooks(Logs):
    """Logs in the hooks of a step, and around them."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("at the start", float(batch_idx), on_step=True, on_epoch=True)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.log("weight", self.net[0].weight.detach().norm(), on_step=True, on_epoch=True)

    def on_after_backward(self) -> None:
        self.log("after", self.net[0].weight.grad.norm(), on_step=True, on_epoch=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("value", self.net[4].weight.grad.norm(), on_step=True, on_epoch=True)
        self.log_dict({"smallest": self.net[4].weight.grad.min()}, on_epoch=True, reduce_fx="min")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("at the end", outputs["loss"] if batch_idx % 2 else batch_idx, on_step=True, on_epoch=True)
        if batch_idx % 3 == 0:
            self.log("now and then", outputs["loss"], on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("of the epoch", self.net[0].weight.detach().norm())


class LogsToo(pl.Callback):
    """Lightning lends callbacks the module's `log`."""

    log: Any

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        self.log("bias", pl_module.net[4].bias.grad.norm(), on_step=True, on_epoch=True)
        self.log("constant", 3)
        pl_module.log("by the module", 4.0, on_epoch=True)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("index", float(batch_idx), on_epoch=True, reduce_fx="sum")


@pytest.mark.parametrize("at", [never, every(1), every(3)], ids=["never", "always", "sometimes"])
def test_what_hooks_and_callbacks_log(at: Callable[[int], bool]) -> None:
    def say(module: Any, batch: Any, loss: Tensor) -> None:
        module.log("value", loss, on_step=True, on_epoch=True)  # the same name as in a hook

    logged(lambda: OfHooks(say), at=at, callbacks=lambda: [LogsToo()])


def test_a_number_that_a_callback_logs_is_seen_to_change() -> None:
    class Counts(pl.Callback):
        log: Any
        count = 0.0

        def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
            Counts.count += 1
            self.log("count", Counts.count)

    graph = CUDAGraphStep(stand_in=True, trusted=("Counts.on_before_optimizer_step",))
    with pytest.warns(UserWarning, match=r"self.log\('count'\) is given a Python number that changes"):
        fit(Small(), batches(8), graph, callbacks=[Counts()])
    assert graph.pool.hits == 0


class OfMetrics(Logs):
    """Logs metrics in every way that Lightning knows."""

    def __init__(self) -> None:
        super().__init__(lambda *_: None)
        self.accuracy, self.mean = MulticlassAccuracy(4), MeanMetric()
        self.several = MetricCollection({"a": MulticlassAccuracy(4), "r": MulticlassRecall(4)})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.mean.update(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.several(logits, batch[1])
        self.log_dict(self.several, on_step=True, on_epoch=True)
        self.log("loss", loss)
        return loss


@pytest.mark.parametrize("at", [never, every(3)], ids=["never", "sometimes"])
def test_metrics(at: Callable[[int], bool]) -> None:
    logged(OfMetrics, at=at)


def test_doubles_stay_doubles_for_a_graph_captured_after_a_reset() -> None:
    """A reset store makes its sums anew, in single precision, while an earlier graph still adds to the old ones."""

    def say(module: Any, batch: Any, loss: Tensor) -> None:
        module.log("value", loss.double() * 1.0000001, on_step=False, on_epoch=True)

    # The second size is captured at the start of the second epoch, before the first is replayed again.
    sizes = [4, 6, 6, 6, 6, 6, 6, 6]
    data = Batches([batches(1, (rows,), seed=index).made[0] for index, rows in enumerate(sizes)])
    logged(lambda: Logs(say), data, max_epochs=4)


def test_a_value_that_is_new_after_the_warm_up_is_named() -> None:
    class Late(Logs):
        def __init__(self) -> None:
            super().__init__(lambda *_: None)
            self.is_late = False

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if self.is_late:
                self.log("late", loss)
            return loss

    class Switches(pl.Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            pl_module.is_late = trainer.current_epoch == 1

    told = []
    for module, graph in zip(same_start(Late), (CUDAGraphStep(stand_in=True), None), strict=True):
        rows = Rows()
        fit(module, batches(10), graph, callbacks=[Switches()], logger=rows, log_every_n_steps=2, max_epochs=3)
        told.append(rows.rows)
        assert graph is None or (graph.pool.hits > 10 and "is_late changed from False to True" in graph.notes[0])
    assert told[0] == told[1]


def test_the_store_by_itself() -> None:
    trainer = fit(Small(), batches(1), max_epochs=1)
    results = StepResults(trainer.fit_loop.epoch_loop._results, trainer)
    assert results.plain().keys() == results.keys()
    with results.collecting() as logs, pytest.raises(OptimizationError) as caught:
        results.log("training_step", "new", torch.tensor(1.0))
    assert logs == {}
    assert str(caught.value) == (
        "self.log('new') was not called in the eager steps before the capture, so it depends on something that "
        "changes from step to step; call it in every step, or log it in on_train_batch_end."
    )
