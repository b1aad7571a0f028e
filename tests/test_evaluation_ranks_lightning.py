"""Dedicated evaluation ranks in Lightning: training as without them, scores as of one process, one end for all."""

import inspect
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops import _EvaluationLoop, _FitLoop, _TrainingEpochLoop
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer import call
from rank_processes import run_ranks
from score_functions import in_order
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fasttrain.callbacks import EvaluationRanks
from fasttrain.callbacks.evaluation_ranks import (
    EvaluationRanksConfig,
    EvaluationRanksOptimization,
    EvaluationRanksStrategy,
)
from fasttrain.callbacks.evaluation_ranks.strategy import known, only
from fasttrain.callbacks.scored_elsewhere.late_checkpoint import LateCheckpoint
from fasttrain.checkpoints import LAST
from fasttrain.config import CheckpointConfig, TargetConfig, TrainerConfig
from fasttrain.ddp import processes_of
from fasttrain.environment import Hardware
from fasttrain.errors import OptimizationError
from fasttrain.optimization import Applies, Context, Refuses
from fasttrain.resume import ResumePoint
from fasttrain.target import StopAtTarget

forks = pytest.mark.skipif(torch.cuda.is_initialized(), reason="a process that uses CUDA can't be forked")
TRAIN, VAL, BATCH = 20, 11, 2


class Data(pl.LightningDataModule):
    """A foreign project's: nothing in it knows of ranks."""

    def _loader(self, count: int, shuffle: bool) -> DataLoader[Any]:
        images = torch.randn(count, 4, generator=torch.Generator().manual_seed(count))
        return DataLoader(TensorDataset(torch.arange(count), images), batch_size=BATCH, shuffle=shuffle)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(TRAIN, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(VAL, shuffle=False)


class Module(pl.LightningModule):
    """Has buffers, draws random numbers, and logs over all ranks."""

    def __init__(self, breaks: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
        self.breaks = breaks
        self.rows: list[Any] = []
        self.seen: list[list[int]] = []
        self.worlds: set[tuple[int, int]] = set()
        self.blocking: dict[str, float] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.breaks != "training" or self.trainer.global_step < 3, "a broken label"
        loss: Tensor = self.net(batch[1]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert self.breaks != "evaluation" or batch_idx < 2, "a broken image"
        assert not self.net[1].training
        numbers, images = batch
        self.worlds.add((dist.get_world_size(), self.trainer.world_size) if dist.is_initialized() else (1, 1))
        self.seen.append(numbers.tolist())
        self.rows.append(torch.stack([numbers.double(), self.net(images)[:, 0].double()], dim=1).numpy())

    def validation_rows(self) -> list[Any]:
        rows, self.rows = self.rows, []
        return rows

    def ground_truth(self) -> dict[str, Any]:
        return {}

    def score_function(self) -> str:
        return "score_functions:in_order"

    def on_validation_epoch_end(self) -> None:
        self.blocking = in_order({}, np.concatenate(self.validation_rows()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def score_of(weights: dict[str, Tensor]) -> dict[str, float]:
    """Return the score in one process, evaluated as plain Lightning does."""
    module = Module()
    module.load_state_dict(weights)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False
    )
    trainer.validate(module, datamodule=Data(), verbose=False)
    assert [number for numbers in module.seen for number in numbers] == list(range(VAL))
    return module.blocking


class Tells(pl.Callback):
    """Writes down what each rank came to, and the weights of each validation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.weights: list[Any] = []
        self.took: list[int] = []
        self.rank, self.first = 0, False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        roles = getattr(trainer.strategy, "roles", None)
        self.rank = trainer.global_rank if roles is None else roles.rank
        self.first = trainer.is_global_zero

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        taken = len(next((c.scores for c in trainer.callbacks if isinstance(c, EvaluationRanks)), []))
        self.took += [trainer.global_step] * (taken - len(self.took))

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.weights.append({name: value.clone() for name, value in pl_module.state_dict().items()})

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Module)
        ranks = [callback for callback in trainer.callbacks if isinstance(callback, EvaluationRanks)]
        targets = [callback for callback in trainer.callbacks if isinstance(callback, StopAtTarget)]
        told = {
            "weights": pl_module.state_dict(), "step": trainer.global_step, "seen": pl_module.seen,
            "worlds": pl_module.worlds, "validated": self.weights, "took": self.took,
            "scores": [(tag.step, tag.epoch, scores) for each in ranks for tag, scores in each.scores],
            "changes": [each.changes for each in ranks], "table": [each.table() for each in ranks],
            "reached_at": [target.reached_at for target in targets], "first": self.first,
            "metrics": dict(trainer.callback_metrics),
        }  # fmt: skip
        torch.save(told, self.folder / f"rank{self.rank}.pt")


def fit(folder: Path, training: int, evaluation: int, *callbacks: pl.Callback, **options: Any) -> list[Any]:
    """Train on so many ranks, evaluate on so many others; return what each told."""
    folder.mkdir(exist_ok=True)
    schedule, module = options.pop("schedule", {}), options.pop("module", None) or Module()
    resume = options.pop("resume", None)
    fork: Any = {"start_method": "fork", "process_group_backend": "gloo", "timeout": timedelta(seconds=30)}
    strategy, added = DDPStrategy(**fork), list(callbacks)
    if evaluation:
        ranks = EvaluationRanks(eval_ranks=evaluation, timeout_seconds=30, dead_after_seconds=20, **schedule)
        strategy, added = EvaluationRanksStrategy(ranks.config, **fork), [ranks, *callbacks]
    trainer = pl.Trainer(
        accelerator="cpu", devices=training + evaluation, strategy=strategy, callbacks=[*added, Tells(folder)],
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
        **{"max_epochs": 3, "logger": CSVLogger(folder, name="", version=""), **options},
    )  # fmt: skip
    torch.manual_seed(3)
    trainer.fit(module, datamodule=Data(), ckpt_path=resume)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(training + evaluation)]


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@forks
def test_two_train_and_two_evaluate(tmp_path: Path) -> None:
    schedule = {"early_epochs": 1, "late_wait": 2}
    target = StopAtTarget(TargetConfig("count", VAL))  # reached by the first evaluation, and known before the second
    ranks = fit(tmp_path / "stops", 2, 2, target, schedule=schedule)
    assert [rank["step"] for rank in ranks[:2]] == [9, 9], "a batch before the second evaluation"
    assert all(rank["reached_at"][0]["step"] == 5 for rank in ranks[:2]), "time to target is that of the weights"

    ranks = fit(tmp_path / "ours", 2, 2, schedule=schedule, max_epochs=4)
    plain = fit(tmp_path / "plain", 2, 0, limit_val_batches=0, max_epochs=4)
    trained, evaluated = ranks[:2], ranks[2:]
    for mine, expected in zip(trained, plain, strict=True):
        assert mine["step"] == expected["step"] == 4 * TRAIN // BATCH // 2
        assert_same(mine["weights"], expected["weights"])
        assert mine["took"] == [9, 12, 17], "late in the first epoch, two batches after the weights from the second on"
        assert mine["scores"] == trained[0]["scores"]
        assert mine["seen"] == []
    assert [rank["first"] for rank in ranks] == [True, False, False, False], "one process writes"
    for number, (step, epoch, scores) in enumerate(trained[0]["scores"]):
        assert (step, epoch) == (5 * (number + 1), number)
        assert scores == score_of(trained[0]["validated"][number])
    assert len(trained[0]["scores"]) == 4
    for rank in evaluated:
        assert rank["worlds"] == {(2, 2)}, "torch's and Lightning's world is the role's"
    for sanity, of_rank in zip((0, 6), ([0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10]), strict=True):
        seen = [number for numbers in evaluated[sanity > 0]["seen"] for number in numbers]
        assert seen[-len(of_rank) * 4 :] == of_rank * 4, "each image once in each evaluation, on one rank"


@forks
def test_one_trains_and_one_evaluates_averaged_weights(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path, monitor="sum", mode="max", save_top_k=1, filename="{step}")
    ranks = fit(tmp_path / "run", 1, 1, EMAWeightAveraging(decay=0.5), best, max_epochs=3)
    trained = ranks[0]
    scores = {step: scores["sum"] for step, _, scores in trained["scores"]}
    assert list(scores) == [10, 20, 30]
    for (_, _, found), weights in zip(trained["scores"], trained["validated"], strict=True):
        assert found == score_of(weights)
    (file,) = tmp_path.glob("*.ckpt")
    checkpoint = torch.load(file, weights_only=False)
    assert checkpoint["global_step"] == max(scores, key=lambda step: scores[step])
    assert score_of(checkpoint["state_dict"])["sum"] == max(scores.values()), "the averaged weights are scored and kept"
    assert trained["metrics"]["sum"] == scores[30]
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    place = {name: index for index, name in enumerate(rows[0].split(","))}
    logged = {int(row.split(",")[place["step"]]): row.split(",")[place["sum"]] for row in rows[1:]}
    assert {step + 1: float(value) for step, value in logged.items() if value} == scores, "under the evaluated step"
    assert trained["changes"][0][0].count == 1
    table = trained["table"][0]
    assert [row[0] for row in table.rows] == [10, 20, 30]
    assert [row[4] for row in table.rows] == [9, 9, 0], "batches later; the last is waited for"


@forks
@pytest.mark.skipif(
    "is_first" not in inspect.signature(LateCheckpoint).parameters, reason="late checkpoints are one process's so far"
)
def test_two_training_ranks_keep_one_best_checkpoint(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path, monitor="sum", mode="max", save_top_k=1, filename="{step}")
    ranks = fit(tmp_path / "run", 2, 1, best, max_epochs=3)
    scores = {step: scores["sum"] for step, _, scores in ranks[0]["scores"]}
    (file,) = tmp_path.glob("*.ckpt")
    assert torch.load(file, weights_only=False)["global_step"] == max(scores, key=lambda step: scores[step])


@forks
def test_a_run_that_stopped_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    def point() -> ResumePoint:
        return ResumePoint(tmp_path, CheckpointConfig(every_n_minutes=None))

    fit(tmp_path / "first", 1, 1, point(), max_epochs=2)
    (rest, _) = fit(tmp_path / "rest", 1, 1, point(), max_epochs=4, resume=str(tmp_path / LAST))
    (whole, _) = fit(tmp_path / "whole", 1, 1, max_epochs=4)
    assert_same(rest["weights"], whole["weights"])
    assert rest["scores"] == whole["scores"][2:]
    assert [row[0] for row in rest["table"][0].rows] == [10, 30, 40], "without the one that was out, of which it warns"


@forks
@pytest.mark.parametrize("breaks", ["training", "evaluation"])
def test_an_error_of_one_role_ends_the_other(breaks: str, tmp_path: Path) -> None:
    begun = time.monotonic()
    said = {"training": "a broken label", "evaluation": "a broken image"}[breaks]
    with pytest.raises(Exception, match=said):
        fit(tmp_path, 1, 1, module=Module(breaks), num_sanity_val_steps=0, max_epochs=100)
    assert time.monotonic() - begun < 30
    assert not list(tmp_path.glob("*.pt"))


def two_fits_and_a_validation(rank: int) -> Any:
    ranks = EvaluationRanks(timeout_seconds=30, dead_after_seconds=20)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=ranks.strategy, callbacks=[ranks], logger=False, max_epochs=1,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    module, train, val = Module(), Data().train_dataloader(), Data().val_dataloader()
    trainer.fit(module, train, val)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, train, val)
    assert len(val) == len(list(val)) == 6
    module.seen.clear()
    trainer.validate(module, datamodule=Data(), verbose=False)
    return {"scores": ranks.scores, "step": trainer.global_step, "validated": module.seen, "worlds": module.worlds}


@forks
def test_processes_started_by_others_fit_twice_and_validate_together() -> None:
    def work(rank: int) -> Any:
        os.environ["LOCAL_RANK"] = str(rank)  # as torchrun does
        return two_fits_and_a_validation(rank)

    trained, evaluated = run_ranks(2, work)
    assert [tag.step for tag, _ in trained["scores"]] == [10, 20]
    assert evaluated["worlds"] == {(1, 1), (2, 2)}, "an evaluation rank's world in the fits, and that of all after them"
    assert trained["validated"][0] != evaluated["validated"][0], "after a fit all ranks validate, as under DDP"


def test_a_rank_loads_its_own_batches_alone() -> None:
    loaded = []

    class Numbers(Dataset[int]):
        def __len__(self) -> int:
            return 11

        def __getitem__(self, index: int) -> int:
            loaded.append(index)
            return index

    loader = only(DataLoader(Numbers(), batch_size=2), range(2, 4))
    assert [batch.tolist() for batch in loader] == [[4, 5], [6, 7]]
    assert loaded == [4, 5, 6, 7]
    assert len(loader) == 2
    assert loader.batch_sampler.batch_size == 2
    assert [batch.tolist() for batch in only(loader, range(5, 6))] == [[10]], "a part of the whole, and not of a part"
    batches = only([10, 11, 12, 13], range(1, 3))  # a loader of another make
    assert (list(batches), len(batches), batches.index(12)) == ([11, 12], 2, 2)
    with pytest.raises(OptimizationError, match=r"validation loader \(list\) has no length.*use eval_ranks=1"):
        known(float("inf"), [])


@pytest.mark.parametrize(
    ("devices", "nodes", "processes"),
    [(1, 1, 1), (4, 2, 8), ("auto", 1, 1), ("2", 1, 2), ("0,1,3", 1, 3), ([0, 2], 1, 2)],
)
def test_the_plan_knows_the_processes(devices: Any, nodes: int, processes: int) -> None:
    config = TrainerConfig(devices=devices, num_nodes=nodes)
    assert processes_of(config, on_gpu=False) == processes
    context = Context(Module(), Data(), Hardware("cpu", "cpu", "a CPU", 2), processes=processes)
    verdict = EvaluationRanksOptimization(EvaluationRanksConfig(eval_ranks=2)).check(context)
    if processes > 2:
        assert verdict == Applies(f"{processes - 2} of {processes} processes train")
    else:
        assert isinstance(verdict, Refuses)
        assert "needs several processes: 2 to evaluate and at least one to train" in verdict.reason


def test_what_it_refuses(tmp_path: Path) -> None:
    def plain(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
        return pl.Trainer(
            accelerator="cpu", devices=1, callbacks=[*callbacks], logger=False, max_steps=2, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, **options,
        )  # fmt: skip

    ranks = EvaluationRanks()
    with pytest.raises(OptimizationError, match="strategy is SingleDeviceStrategy; give it the callback's own"):
        plain(ranks).fit(Module(), datamodule=Data())
    with pytest.raises(OptimizationError, match="Blank has no validation_rows and no ground_truth and no score_fun"):
        ranks.setup(plain(ranks), type("Blank", (pl.LightningModule,), {})(), "fit")
    alone = EvaluationRanksStrategy(ranks.config, process_group_backend="gloo")
    try:
        with pytest.raises(OptimizationError, match="1 process, and 1 of them would evaluate"):
            plain(ranks, strategy=alone).fit(Module(), datamodule=Data())
    finally:
        dist.destroy_process_group()


@forks
def test_early_stopping_on_a_late_score_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="EarlyStopping monitors 'sum', which training ranks don't know"):
        fit(tmp_path, 1, 1, EarlyStopping("sum"))


def test_lightnings_and_torchs_internals_are_as_they_were() -> None:
    for method in (_FitLoop.run, _EvaluationLoop.setup_data):
        assert list(inspect.signature(method).parameters) == ["self"]
    assert "self.val_loop.run()" in inspect.getsource(_TrainingEpochLoop.on_advance_end)
    assert "self.fit_loop.run()" in inspect.getsource(pl.Trainer._run_stage)
    assert 'barrier("pre_setup")' in inspect.getsource(call._call_setup_hook)
    source = inspect.getsource(_EvaluationLoop.setup_data)
    assert "self._combined_loader = combined_loader" in source
    assert "self._max_batches.append(num_batches)" in source
    assert list(inspect.signature(distributed_c10d._update_default_pg).parameters) == ["pg"]
    for name in ("setup_distributed", "configure_ddp", "barrier"):
        assert callable(getattr(DDPStrategy, name))
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    loop: Any = trainer.fit_loop
    assert loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed == trainer.global_step
    assert (loop.epoch_progress.current.completed, loop.epoch_progress.current.processed) == (0, 0)
    assert loop.epoch_loop.val_loop.batch_progress.is_last_batch is False
    assert "batch_sampler" in vars(DataLoader([1, 2], batch_size=1))
