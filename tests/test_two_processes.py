"""Two processes: each sample once an epoch, evaluation without padding, one checkpoint, the same weights."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import Dataset

from fasttrain.checkpoints import LAST
from fasttrain.clock import RunClock
from fasttrain.config import CheckpointConfig, TargetConfig
from fasttrain.order import EpochOrder, ResumableLoader, SampleKey
from fasttrain.plan import Plan
from fasttrain.recorder import RunRecorder
from fasttrain.results import MetricsFile
from fasttrain.resume import ResumePoint
from fasttrain.target import StopAtTarget

TRAIN, VAL, BATCH, EPOCHS = 13, 5, 2, 3


class Keys(Dataset[Tensor]):
    def __getitem__(self, key: SampleKey) -> Tensor:
        return torch.tensor([float(key.epoch), float(key.index)])


class Data(pl.LightningDataModule):
    def _loader(self, size: int, shuffle: bool, even: bool) -> ResumableLoader:
        assert self.trainer is not None
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        order = EpochOrder(size, shuffle=shuffle, seed=0, rank=rank, world_size=world_size, even=even)
        return ResumableLoader(Keys(), order, batch_size=BATCH)

    def train_dataloader(self) -> ResumableLoader:
        return self._loader(TRAIN, shuffle=True, even=True)

    def val_dataloader(self) -> ResumableLoader:
        return self._loader(VAL, shuffle=False, even=False)


class Module(pl.LightningModule):
    """Notes what its rank sees, and logs a score of its rank's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(2, 1)
        self.seen: dict[str, list[list[float]]] = {"train": [], "val": []}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen["train"] += batch.tolist()
        loss: Tensor = self.net(batch / 10).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen["val"] += [[self.current_epoch, index] for _, index in batch.tolist()]

    def on_validation_epoch_end(self) -> None:
        good = self.current_epoch >= (2 if self.global_rank == 0 else 0)  # rank 1 is there two epochs earlier
        self.log("score", float(good), sync_dist=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Tells(pl.Callback):
    """Writes down what each rank saw and has at the end."""

    def __init__(self, folder: Path, recorder: RunRecorder) -> None:
        self.folder, self.recorder = folder, recorder

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Module)
        told = {
            "seen": pl_module.seen,
            "weights": [value.tolist() for value in pl_module.state_dict().values()],
            "step": trainer.global_step,
            "samples": self.recorder.samples,
        }
        (self.folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(told))


def fit(folder: Path, *callbacks: pl.Callback, resume: bool = False, **options: Any) -> list[dict[str, Any]]:
    """Train on two ranks; return what each told."""
    folder.mkdir(exist_ok=True)
    recorder = RunRecorder(Plan(), RunClock(), 0.0, lambda record: None)
    point = ResumePoint(folder / "checkpoints", CheckpointConfig(every_n_minutes=None))
    strategy = DDPStrategy(start_method="fork", process_group_backend="gloo", timeout=timedelta(seconds=60))
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, logger=MetricsFile(folder / "metrics.csv"),
        callbacks=[recorder, *callbacks, point, Tells(folder, recorder)], enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, log_every_n_steps=1, **{"max_epochs": EPOCHS, **options},
    )  # fmt: skip
    trainer.fit(Module(), datamodule=Data(), ckpt_path=str(folder / "checkpoints" / LAST) if resume else None)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="a process that uses CUDA can't be forked")
def test_two_processes(tmp_path: Path) -> None:
    ranks = fit(tmp_path)
    for epoch in range(EPOCHS):
        trained = [int(index) for rank in ranks for e, index in rank["seen"]["train"] if e == epoch]
        assert len(trained) == len(set(trained)) == TRAIN - 1, "each once; the odd one is left out of this epoch"
        shares = [[int(index) for e, index in rank["seen"]["val"] if e == epoch] for rank in ranks]
        assert shares == [[0, 2, 4], [1, 3]], "every validation sample once, none twice"
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert ranks[0]["step"] == ranks[1]["step"] == 3 * EPOCHS
    assert ranks[0]["samples"] == EPOCHS * (TRAIN - 1), "the samples of both ranks"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [LAST]
    checkpoint = torch.load(tmp_path / "checkpoints" / LAST)
    assert [value.tolist() for value in checkpoint["state_dict"].values()] == ranks[0]["weights"]
    losses = [line.split(",") for line in (tmp_path / "metrics.csv").read_text().splitlines() if ",loss," in line]
    assert [int(step) for step, *_ in losses] == list(range(3 * EPOCHS)), "one process writes the metrics"


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="a process that uses CUDA can't be forked")
def test_two_processes_stop_together_and_resume(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole")
    first = fit(tmp_path / "parts", max_steps=4)  # in the middle of the second epoch
    rest = fit(tmp_path / "parts", resume=True)
    for rank in range(2):
        assert first[rank]["step"] == 4
        assert whole[rank]["seen"]["train"] == first[rank]["seen"]["train"] + rest[rank]["seen"]["train"]
        assert whole[rank]["weights"] == rest[rank]["weights"]


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="a process that uses CUDA can't be forked")
def test_scores_of_the_ranks_own_dont_part_them(tmp_path: Path) -> None:
    ranks = fit(tmp_path, StopAtTarget(TargetConfig("score", 0.5)), max_epochs=5)
    assert [rank["step"] for rank in ranks] == [9, 9], "the first rank's score decides for both"
