"""evaluation_cache: batches are the loader's own, those that are not the same each time are made anew, and nothing else
notices."""

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fasttrain.callbacks.evaluation_cache import EvaluationCache, EvaluationCacheOptimization
from fasttrain.callbacks.evaluation_cache.draws import draw_seeds, now, seeds_drawn
from fasttrain.callbacks.evaluation_cache.loader import Doing
from fasttrain.environment import Hardware
from fasttrain.errors import ConfigError
from fasttrain.optimization import Applies, Context, Refuses
from fasttrain.order import EpochOrder, ResumableLoader

ROWS = torch.randint(256, (11, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


class Counted(Dataset[dict[str, Any]]):
    """Rows by index, or by `SampleKey`; counts how many were made."""

    def __init__(self) -> None:
        self.made = 0

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, key: Any) -> dict[str, Any]:
        self.made += 1
        index = key if isinstance(key, int) else key.index
        return {"x": ROWS[index], "index": index, "nan": torch.tensor(float("nan"))}


class Sees(pl.LightningModule):
    """Keeps what each evaluation was given, and trains with random numbers of the global generator."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
        self.seen: list[list[dict[str, Any]]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def on_validation_epoch_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.seen.append([])

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.seen[-1].append({name: value.clone() for name, value in batch.items()})
        self.look_at(batch)

    def look_at(self, batch: dict[str, Any]) -> None:
        batch.pop("nan")  # a step may do as it likes with the container

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(module: Sees, loader: Any, *callbacks: pl.Callback, epochs: int = 5, **options: Any) -> pl.Trainer:
    torch.manual_seed(1)
    training = DataLoader(TensorDataset(torch.randn(8, 3)), batch_size=4, shuffle=True)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=epochs, callbacks=list(callbacks), logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(module, training, loader)
    return trainer


def made() -> Sees:
    torch.manual_seed(0)
    return Sees()


def whole_passes(cache: EvaluationCache) -> dict[Doing, int]:
    assert cache.loader is not None
    return {doing: count for doing, count in cache.loader.passes.items() if count}


def plain_loader(dataset: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=4)


def resumable_loader(dataset: Any) -> ResumableLoader:
    return ResumableLoader(dataset, EpochOrder(len(ROWS), shuffle=False, seed=0), batch_size=4)


def two_loaders(dataset: Any) -> dict[str, Any]:
    return {"a": plain_loader(dataset), "b": plain_loader(dataset)}


class SeesTwo(Sees):
    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step({**batch, "loader": torch.tensor(dataloader_idx)}, batch_idx)


@pytest.mark.parametrize("make", [plain_loader, resumable_loader, two_loaders])
@pytest.mark.parametrize("inference_mode", [True, False])
def test_batches_and_training_are_the_same_and_the_loader_makes_none(make: Any, inference_mode: bool) -> None:
    plain, ours = (SeesTwo() if make is two_loaders else Sees() for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    dataset, cache = Counted(), EvaluationCache(most_gb=1)
    fitted(plain, make(Counted()), inference_mode=inference_mode)
    state = now()
    fitted(ours, make(dataset), cache, inference_mode=inference_mode)
    assert seeds_drawn(state, now()) == 0
    loaders = 2 if make is two_loaders else 1
    assert dataset.made == loaders * (8 + 2 * len(ROWS)), "the sanity check's batches and two evaluations'"
    assert whole_passes(cache) == {Doing.KEEPING: 1, Doing.COMPARING: 1, Doing.HANDING_OUT: 3}
    for one, other in zip(plain.seen, ours.seen, strict=True):
        for a, b in zip(one, other, strict=True):
            assert list(a) == list(b)
            assert all(torch.equal(a[name].nan_to_num(7.0), b[name].nan_to_num(7.0)) for name in a)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, ours.state_dict()[name])
    assert cache.table().rows == [(1, "kept"), (1, "compared with those kept"), (3, "handed out from the device")]
    assert cache.loader is not None
    assert not len(cache.loader.kept), "memory is given back"
    assert not cache.notes


def test_trusted_after_the_first_if_asked_for() -> None:
    dataset, cache = Counted(), EvaluationCache(most_gb=1, compared=0)
    fitted(made(), plain_loader(dataset), cache, num_sanity_val_steps=0)
    assert dataset.made == len(ROWS)
    assert whole_passes(cache) == {Doing.KEEPING: 1, Doing.HANDING_OUT: 4}


class Augmented(Counted):
    """Other values each time, without touching a generator that anyone looks at."""

    def __getitem__(self, key: Any) -> dict[str, Any]:
        sample = super().__getitem__(key)
        return sample | {"x": sample["x"] + self.made // 15}


class DrawsInThisProcess(Counted):
    def __getitem__(self, key: Any) -> dict[str, Any]:
        random.random()
        return super().__getitem__(key)


class Objects(Counted):
    def __getitem__(self, key: Any) -> dict[str, Any]:
        return super().__getitem__(key) | {"of": object()}


class Writes(Sees):
    def look_at(self, batch: dict[str, Any]) -> None:
        batch["x"].add_(1)


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: torch.stack([torch.as_tensor(sample[name]) for sample in samples]) for name in ("x", "index", "nan")}


@pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled")
@pytest.mark.parametrize(
    ("dataset", "options", "reason"),
    [
        (Augmented(), {}, "the loader made other batches than before (other values)"),
        (DrawsInThisProcess(), {}, "making its batches draws random numbers in this process"),
        (Counted(), {"shuffle": True}, "samples come in another order each time (RandomSampler)"),
    ],
)
def test_what_is_not_the_same_each_time_is_made_anew(dataset: Counted, options: dict[str, Any], reason: str) -> None:
    module, cache = made(), EvaluationCache(most_gb=1)
    fitted(module, DataLoader(dataset, batch_size=4, collate_fn=collate, **options), cache)
    (note,) = cache.notes
    assert note.startswith("batches are made anew for each evaluation, since ")
    assert reason in note
    assert dataset.made == 8 + 5 * len(ROWS)


def test_a_step_that_writes_to_its_batch_never_sees_what_it_wrote() -> None:
    module, cache = Writes(), EvaluationCache(most_gb=1)
    fitted(module, plain_loader(Counted()), cache)
    assert whole_passes(cache) == {Doing.KEEPING: 1, Doing.COMPARING: 1, Doing.HANDING_OUT: 1, Doing.NOTHING: 2}
    assert "a step wrote to a batch in place" in cache.notes[0]
    for evaluation in module.seen:
        assert torch.equal(torch.cat([batch["x"] for batch in evaluation]), ROWS)


def test_too_large_is_known_at_the_first_batch() -> None:
    cache = EvaluationCache(most_gb=1e-7)
    fitted(made(), plain_loader(Counted()), cache, epochs=2)
    (note,) = cache.notes
    assert "its batches take 0.0 GB, and 0.0 GB are for them" in note
    assert cache.table().note.startswith("nothing was kept")


def test_an_evaluation_that_ends_early_is_not_taken_for_a_whole_one() -> None:
    class StopsTwice(Sees):
        def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            if len(self.seen) in (1, 3) and batch_idx == 1:
                raise StopIteration

    module, cache = StopsTwice(), EvaluationCache(most_gb=1)
    fitted(module, plain_loader(Counted()), cache, num_sanity_val_steps=0)
    assert whole_passes(cache) == {Doing.KEEPING: 1, Doing.COMPARING: 1, Doing.HANDING_OUT: 1}
    assert [len(evaluation) for evaluation in module.seen] == [2, 3, 2, 3, 3]


def test_a_loader_that_lightning_makes_anew() -> None:
    dataset, cache = Counted(), EvaluationCache(most_gb=1)

    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return DataLoader(TensorDataset(torch.randn(8, 3)), batch_size=4)

        def val_dataloader(self) -> Any:
            return plain_loader(dataset)

    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=3, callbacks=[cache], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, reload_dataloaders_every_n_epochs=1,
    )  # fmt: skip
    trainer.fit(made(), datamodule=Data())
    assert dataset.made == 8 + 3 * len(ROWS)
    assert "Lightning makes the loader anew" in cache.notes[0]


def test_seeds_that_a_loader_draws() -> None:
    before = now()
    iter(DataLoader(TensorDataset(ROWS)))
    assert seeds_drawn(before, now()) == 1
    state = now()
    torch.set_rng_state(before["torch"])
    draw_seeds(1)
    assert seeds_drawn(state, now()) == 0
    np.random.rand()
    assert seeds_drawn(state, now()) is None
    before = now()
    torch.rand(3)
    assert seeds_drawn(before, now()) is None


def test_on_a_cpu_it_is_asked_for_by_a_bound() -> None:
    cache = EvaluationCache()
    fitted(made(), plain_loader(Counted()), cache, epochs=1)
    assert not cache.changes
    with pytest.raises(ConfigError, match=r"evaluation_cache\.most_gb is 0; it must be greater than 0"):
        EvaluationCache(most_gb=0)
    with pytest.raises(ConfigError, match=r"evaluation_cache\.compared is -1; it must be at least 0"):
        EvaluationCache(compared=-1)


@pytest.mark.parametrize(
    ("most_gb", "loader", "verdict"),
    [
        (1.0, plain_loader(Counted()), Applies("its batches take 0.00 GB on each device, of 1.00 that are for them")),
        (
            1e-9,
            plain_loader(Counted()),
            Refuses("its batches would take 0.00 GB on each device, and 0.00 are for them (most_gb)"),
        ),
        (
            1.0,
            DataLoader(Counted(), shuffle=True),
            Refuses("the validation loader's samples come in another order each time (RandomSampler)"),
        ),
        (1.0, [1, 2], Applies("what its batches take will show; at most 1.0 GB")),
    ],
)
def test_the_plan_says_what_they_take(most_gb: float, loader: Any, verdict: Any) -> None:
    class Data(pl.LightningDataModule):
        def val_dataloader(self) -> Any:
            return loader

    gpu = Hardware("cuda", "cuda:0", "a GPU", 2)
    optimization = EvaluationCacheOptimization(EvaluationCache(most_gb=most_gb).config)
    assert optimization.check(Context(made(), Data(), gpu)) == verdict
