"""A run stopped at any step and resumed ends with the weights and metrics of one that never stopped, bit for bit."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from fasttrain.checkpoints import LAST, readable_checkpoint
from fasttrain.config import CheckpointConfig
from fasttrain.errors import ConfigError, DataError
from fasttrain.order import EpochOrder, ResumableLoader, SampleKey
from fasttrain.results import RunFolder
from fasttrain.resume import ResumePoint

EPOCHS, BATCHES = 3, 5


class Numbers(Dataset[Tensor]):
    """Each sample is a function of the epoch and the index, as augmented data is."""

    def __getitem__(self, key: SampleKey) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * key.epoch + key.index)
        return torch.randn(4, generator=generator)

    def __len__(self) -> int:
        return 2 * BATCHES


class Probe(pl.LightningModule):
    """Momentum, dropout, a schedule and batch norm: everything that has a state of its own. Notes each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.seen: list[tuple[int, list[float]]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append((self.trainer.global_step, batch.flatten().tolist()))
        loss = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        torch.rand(3)  # an evaluation that draws random numbers must not change training
        self.log("score", self.net(batch).mean())

    def configure_optimizers(self) -> dict[str, object]:
        # A schedule that knows its length has Lightning make the loaders before the checkpoint is read.
        assert self.trainer.estimated_stepping_batches > 0
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8), "interval": "step"},
        }


class Values(pl.Callback):
    """Keeps what was logged, by step."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, str, float]] = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.rows.append((trainer.global_step, "score", float(trainer.callback_metrics["score"])))

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        self.rows.append((trainer.global_step, "loss", float(trainer.callback_metrics["loss"])))


class StopAt(pl.Callback):
    """Does what Ctrl-C does, in the middle of the given step."""

    def __init__(self, point: ResumePoint, step: int) -> None:
        self.point, self.step = point, step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step == self.step - 1:
            self.point.interrupt()


def loader(shuffle: bool, workers: int = 0) -> ResumableLoader:
    order = EpochOrder(2 * BATCHES, shuffle=shuffle, seed=3)
    return ResumableLoader(Numbers(), order, batch_size=2, num_workers=workers)


def train(folder: Path, stop_at: int | None = None, resume: bool = False, **options: object) -> tuple[Probe, Values]:
    torch.manual_seed(0)
    module, values = Probe(), Values()
    if resume:
        torch.manual_seed(99)  # whatever the new process's state is, the checkpoint's counts
    point = ResumePoint(folder, CheckpointConfig(every_n_minutes=None))
    stop = [StopAt(point, stop_at)] if stop_at else []
    settings: dict[str, object] = {"max_epochs": EPOCHS, **options}
    workers = int(settings.pop("workers", 0))  # type: ignore[call-overload]
    trainer = pl.Trainer(
        accelerator="cpu", callbacks=[values, *stop, point], logger=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, log_every_n_steps=1, **settings,
    )  # fmt: skip
    trainer.fit(module, loader(True, workers), loader(False), ckpt_path=str(folder / LAST) if resume else None)
    return module, values


def assert_same_end(whole: tuple[Probe, Values], first: tuple[Probe, Values], rest: tuple[Probe, Values]) -> None:
    for name, value in whole[0].state_dict().items():
        assert torch.equal(value, rest[0].state_dict()[name]), name
    assert whole[0].seen == first[0].seen + rest[0].seen, "the batches differ"
    assert whole[1].rows == first[1].rows + rest[1].rows, "the metrics differ"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Probe, Values]:
    return train(tmp_path_factory.mktemp("whole"))


# The first step, the last two of an epoch, the first of the next, the last of one and the last but one of all.
@pytest.mark.parametrize("stop_at", [1, 4, 5, 6, 10, EPOCHS * BATCHES - 1])
def test_stopped_at_any_step(tmp_path: Path, whole: tuple[Probe, Values], stop_at: int) -> None:
    first = train(tmp_path / "parts", stop_at=stop_at)
    assert len(first[0].seen) == stop_at
    assert_same_end(whole, first, train(tmp_path / "parts", resume=True))


@pytest.mark.parametrize(
    ("options", "stop_at"),
    [({"val_check_interval": 2}, 3), ({"val_check_interval": 2}, 4), ({"accumulate_grad_batches": 2}, 1),
     ({"accumulate_grad_batches": 2}, 3), ({"accumulate_grad_batches": 2}, 5)],
    ids=str,
)  # fmt: skip
def test_with_validation_inside_epochs_and_accumulation(
    tmp_path: Path, options: dict[str, object], stop_at: int
) -> None:
    whole = train(tmp_path / "whole", **options)
    first = train(tmp_path / "parts", stop_at=stop_at, **options)
    assert_same_end(whole, first, train(tmp_path / "parts", resume=True, **options))


def test_stopped_by_max_steps_and_extended(tmp_path: Path, whole: tuple[Probe, Values]) -> None:
    first = train(tmp_path / "parts", max_steps=7)
    assert len(first[0].seen) == 7
    assert_same_end(whole, first, train(tmp_path / "parts", resume=True))


class BrokenOnce(Numbers):
    """Fails when the eighth batch is fetched, as at an image that can't be decoded."""

    def __init__(self) -> None:
        self.fetched = 0

    def __getitem__(self, key: SampleKey) -> Tensor:
        self.fetched += 1
        if self.fetched == 15:
            raise DataError("image 7 is broken")
        return super().__getitem__(key)


def test_failed_fetch_loses_nothing(
    tmp_path: Path, whole: tuple[Probe, Values], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = ResumableLoader(BrokenOnce(), EpochOrder(2 * BATCHES, shuffle=True, seed=3), batch_size=2)
    good = loader
    monkeypatch.setitem(globals(), "loader", lambda shuffle, workers=0: broken if shuffle else good(False))
    with pytest.raises(DataError, match="image 7 is broken"):
        train(tmp_path)
    monkeypatch.setitem(globals(), "loader", good)
    rest, _ = train(tmp_path, resume=True)
    assert rest.seen == whole[0].seen[7:]
    for name, value in whole[0].state_dict().items():
        assert torch.equal(value, rest.state_dict()[name]), name


def test_with_loader_workers(tmp_path: Path, whole: tuple[Probe, Values]) -> None:
    first = train(tmp_path / "parts", stop_at=7, workers=1)
    assert_same_end(whole, first, train(tmp_path / "parts", resume=True, workers=1))


def test_stopped_twice(tmp_path: Path, whole: tuple[Probe, Values]) -> None:
    first = train(tmp_path / "parts", stop_at=4)
    second = train(tmp_path / "parts", stop_at=9, resume=True)
    third = train(tmp_path / "parts", resume=True)
    assert whole[0].seen == first[0].seen + second[0].seen + third[0].seen
    for name, value in whole[0].state_dict().items():
        assert torch.equal(value, third[0].state_dict()[name]), name


def test_checkpoint_is_an_ordinary_one(tmp_path: Path) -> None:
    module, _ = train(tmp_path, stop_at=7)
    trainer = pl.Trainer(accelerator="cpu", max_epochs=EPOCHS, logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    plain = Probe()
    trainer.fit(plain, loader(True), loader(False), ckpt_path=str(tmp_path / LAST))
    assert trainer.global_step == EPOCHS * BATCHES
    content = torch.load(tmp_path / LAST, weights_only=True)
    assert set(content["state_dict"]) == set(module.state_dict())


def test_no_checkpoint_yet(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "probe")
    with pytest.raises(ConfigError, match=r"has no last\.ckpt: the run stopped before its first checkpoint; start it"):
        readable_checkpoint(folder)


@pytest.mark.parametrize("damage", ["cut", "empty", "other"])
def test_corrupt_checkpoint(tmp_path: Path, damage: str) -> None:
    folder = RunFolder.create(tmp_path / "run", "probe")
    train(folder.checkpoints, stop_at=2)
    path = folder.checkpoints / LAST
    content = path.read_bytes()
    path.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "other": b"not a checkpoint"}[damage])
    (folder.checkpoints / "best.ckpt").write_bytes(content)
    with pytest.raises(DataError) as caught:
        readable_checkpoint(folder)
    sentence = str(caught.value)
    assert sentence.startswith(f"the checkpoint {path} can't be read (")
    assert sentence.endswith("it is damaged; best.ckpt beside it may be whole.")


def test_full_disk_names_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pl.Trainer, "save_checkpoint", full)
    with pytest.raises(DataError, match=r"last\.ckpt can't be written \(No space left on device\); the one written"):
        train(tmp_path, stop_at=2)
