"""However a fit with device_prefetch ends, no batch is lost or seen twice when it is resumed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from graph_fits import fit
from prefetched_fits import no_thread_is_left, prefetcher
from torch import Tensor, nn
from torch.utils.data import Dataset

from fasttrain.checkpoints import LAST
from fasttrain.config import CheckpointConfig
from fasttrain.errors import DataError
from fasttrain.order import EpochOrder, ResumableLoader, SampleKey
from fasttrain.resume import ResumePoint

_no_thread_is_left = pytest.fixture(autouse=True)(no_thread_is_left)


class Numbers(Dataset[Tensor]):
    """Each sample is a function of the epoch and the index."""

    broken: int | None = None

    def __getitem__(self, key: SampleKey) -> Tensor:
        if key.index == self.broken and key.epoch == 1:
            raise DataError(f"image {key.index} is broken")
        return torch.tensor([float(100 * key.epoch + key.index)])

    def __len__(self) -> int:
        return 16


class Sees(pl.LightningModule):
    """Notes the samples of each step."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[list[float]] = []
        self.stop_at = stop_at

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(batch.flatten().tolist())
        self.trainer.should_stop |= len(self.seen) == self.stop_at
        return self.layer(batch).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Interrupts(pl.Callback):
    def __init__(self, point: ResumePoint, step: int | None) -> None:
        self.point, self.step = point, step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step + 1 == self.step:
            self.point.interrupt()


class Stream:
    """The same loader without a length."""

    def __init__(self, loader: ResumableLoader) -> None:
        self.loader = loader
        self.sampler = loader.sampler
        self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def see(
    folder: Path, stop: int | None = None, resume: bool = False, *, workers: int = 0, plain: bool = False,
    broken: int | None = None, stream: bool = False, **parameters: Any,
) -> Sees:  # fmt: skip
    module, data = Sees(), Numbers()
    data.broken = broken
    point = ResumePoint(folder, CheckpointConfig(every_n_minutes=None))
    loader: Any = ResumableLoader(data, EpochOrder(16, shuffle=True, seed=1), batch_size=2, num_workers=workers)
    callbacks = [] if plain else [prefetcher(**parameters)]
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=2, callbacks=[*callbacks, Interrupts(point, stop), point], logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module.error = None
    try:
        trainer.fit(module, Stream(loader) if stream else loader, ckpt_path=str(folder / LAST) if resume else None)
    except DataError as error:
        module.error = str(error)
    return module


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Sees:
    return see(tmp_path_factory.mktemp("whole"), plain=True)


# A stream's first batch is fetched by Lightning before it has set the epoch, so only the first epoch can be resumed.
@pytest.mark.parametrize(
    ("stop", "depth", "stream"),
    [(1, 3, False), (4, 1, False), (7, 3, False), (8, 3, False), (9, 2, False), (15, 3, False), (4, 2, True)],
)
def test_stopped_and_resumed_no_batch_is_lost_or_seen_twice(
    tmp_path: Path, whole: Sees, stop: int, depth: int, stream: bool
) -> None:
    first = see(tmp_path, stop, depth=depth, stream=stream)
    assert len(first.seen) == stop
    assert whole.seen == first.seen + see(tmp_path, resume=True, depth=depth, stream=stream).seen


def test_with_worker_processes_it_is_ahead_by_itself(tmp_path: Path, whole: Sees) -> None:
    first = see(tmp_path, 11, workers=1, ahead="auto")
    assert whole.seen == first.seen + see(tmp_path, resume=True, workers=1, ahead="auto").seen


def test_from_ahead_to_plain_and_back(tmp_path: Path, whole: Sees) -> None:
    first = see(tmp_path, 5)
    second = see(tmp_path, 10, resume=True, plain=True)
    assert whole.seen == first.seen + second.seen + see(tmp_path, resume=True).seen


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_sample_stops_the_fit_in_its_turn(tmp_path: Path, whole: Sees, workers: int) -> None:
    where = next(i for i, seen in enumerate(whole.seen) if 105.0 in seen)
    failed = see(tmp_path, broken=5, workers=workers, depth=3)
    assert failed.error == "image 5 is broken"
    assert failed.seen == whole.seen[:where]
    assert whole.seen == failed.seen + see(tmp_path, resume=True).seen, "what was computed before it is kept"


def test_stopped_early_in_the_middle_of_an_epoch() -> None:
    module = Sees(stop_at=3)
    loader = ResumableLoader(Numbers(), EpochOrder(16, shuffle=False, seed=0), batch_size=2, num_workers=1)
    fit(module, loader, callbacks=[prefetcher(depth=4, ahead="auto")])
    assert len(module.seen) == 3
