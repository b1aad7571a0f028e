"""State that goes on beside the graph step: attributes, metrics, averaged weights, checkpoints, and after an error."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from graph_fits import Small, adamw, assert_same_state, batches, fit, same_start
from graph_schedules import step_lr
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from fasttrain.callbacks import CUDAGraphStep


class Remembering(Small):
    """Carries state in ways that a graph does not see by itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("average", torch.zeros(()))
        self.accuracy = MulticlassAccuracy(4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("largest", loss, reduce_fx="max", on_step=False, on_epoch=True)
        self.log("constant", 0.5)
        return loss + self.average


def test_state_in_attributes_and_metrics_goes_on(tmp_path: Path) -> None:
    ours, plain = same_start(Remembering)
    rows = {}
    trainers = []
    for name, module, graph in (("ours", ours, CUDAGraphStep(stand_in=True)), ("plain", plain, None)):
        logger = CSVLogger(tmp_path, name=name, version="")
        trainers.append(fit(module, batches(9), graph, logger=logger, log_every_n_steps=2, max_epochs=3))
        rows[name] = (tmp_path / name / "metrics.csv").read_text()
        assert graph is None or graph.pool.hits > 20, graph.notes
    assert rows["ours"] == rows["plain"]
    assert_same_state(*trainers)
    assert torch.equal(ours.average, plain.average)


def test_a_logged_number_is_told_of() -> None:
    graph = CUDAGraphStep(stand_in=True)
    fit(Remembering(), batches(8), graph)
    assert [note for note in graph.notes if "constant" in note] == [
        "self.log('constant') is given a Python number, and replays go on logging 0.5; log a tensor, or log it in "
        "on_train_batch_end"
    ]


def test_averaged_weights_are_the_same() -> None:
    trainers = []
    for module, graph in zip(same_start(Small), (CUDAGraphStep(stand_in=True), None), strict=True):
        average = pl.callbacks.EMAWeightAveraging(decay=0.9, update_starting_at_step=4)
        trainers.append(fit(module, batches(12), graph, callbacks=[average], validation=batches(2)))
    assert_same_state(*trainers)


def test_checkpoints_go_both_ways(tmp_path: Path) -> None:
    whole, _ = same_start(lambda: Small(adamw, step_lr))
    expected = fit(whole, batches(10), max_epochs=4)
    for first_has_graph in (True, False):
        start, resumed = same_start(lambda: Small(adamw, step_lr))
        graphs = [CUDAGraphStep(stand_in=True), None] if first_has_graph else [None, CUDAGraphStep(stand_in=True)]
        first = fit(start, batches(10), graphs[0], max_epochs=2)
        path = tmp_path / f"{first_has_graph}.ckpt"
        first.save_checkpoint(path)
        second = fit(resumed, batches(10), graphs[1], max_epochs=4, ckpt_path=path)
        assert_same_state(second, expected)
        assert second.global_step == expected.global_step


def test_a_checkpoint_in_the_middle_is_what_plain_lightning_writes(tmp_path: Path) -> None:
    saved = {}
    for name, module, graph in zip(
        ("ours", "plain"), same_start(lambda: Small(adamw, step_lr)), (CUDAGraphStep(stand_in=True), None), strict=True
    ):
        keeper = pl.callbacks.ModelCheckpoint(tmp_path / name, every_n_train_steps=7, save_top_k=-1, filename="{step}")
        fit(module, batches(10), graph, callbacks=[keeper], enable_checkpointing=True)
        saved[name] = torch.load(tmp_path / name / "step=14.ckpt", weights_only=False)
    assert saved["ours"].keys() == saved["plain"].keys()
    assert saved["ours"]["loops"] == saved["plain"]["loops"]
    ours, plain = (saved[name]["optimizer_states"][0] for name in ("ours", "plain"))
    assert ours["param_groups"] == plain["param_groups"]
    for index, values in plain["state"].items():
        assert {key: (type(v), v.device, v.dtype) for key, v in values.items()} == {
            key: (type(v), v.device, v.dtype) for key, v in ours["state"][index].items()
        }


def test_an_exception_in_a_step_leaves_lightning_as_it_was() -> None:
    class Failing(pl.Callback):
        def on_train_batch_end(
            self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 8:
                raise RuntimeError("as planned")

    graph = CUDAGraphStep(stand_in=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[graph, Failing()],
    )
    loop = trainer.fit_loop.epoch_loop
    before = type(loop.automatic_optimization), type(loop._results)
    with pytest.raises(RuntimeError, match="as planned"):
        trainer.fit(Small(), batches(12))
    assert (type(loop.automatic_optimization), type(loop._results)) == before
    assert "advance" not in vars(loop)
    assert graph.pool.hits > 0


def test_a_second_fit_with_the_same_trainer_goes_on() -> None:
    ours, plain = same_start(Small)
    results = []
    for module, graph in ((ours, CUDAGraphStep(stand_in=True)), (plain, None)):
        trainer = fit(module, batches(8), graph, max_epochs=1)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, batches(8))
        results.append(trainer)
    assert_same_state(*results)
