"""The packing data module: every sequence once, on every rank, in fits and resumed fits."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from packed_sequences import (
    MOST,
    VOCABULARY,
    Data,
    Stream,
    Texts,
    Trained,
    packing,
    sequence,
    tokens_in,
    trainer,
)
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, WeightedRandomSampler

from fasttrain.batches import flatten
from fasttrain.errors import DataError, OptimizationError
from fasttrain.order import EpochOrder, ResumableLoader, SampleKey


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_module_gives_every_sequence_once_an_epoch(workers: int) -> None:
    data = packing(Data(num_workers=workers))
    loader = data.train_dataloader()
    wanted = sorted(tuple(sample["input_ids"].tolist()) for sample in Texts())
    epochs = []
    for epoch in range(2):
        loader.order.set_epoch(epoch)
        batches = list(loader)
        assert sorted(tokens_in(batches)) == wanted
        assert len(batches) == len(loader)
        assert len({flatten(batch)[1] for batch in batches}) == 1, "one captured graph does for all"
        assert data.sequences_seen == 41 * (epoch + 1)
        epochs.append(batches)
    assert not torch.equal(epochs[0][0]["input_ids"], epochs[1][0]["input_ids"])


def test_shapes_may_follow_the_number_of_sequences() -> None:
    loader = packing(static=False, rows_per_batch=2).train_dataloader()
    by_count: dict[int, set[Any]] = {}
    for epoch in range(4):
        loader.order.set_epoch(epoch)
        for batch in loader:
            by_count.setdefault(int(batch["num_sequences"]), set()).add(flatten(batch)[1])
    assert {2, 3, 4, 5, 6} >= set(by_count) >= {3, 4, 5}
    assert all(len(signatures) == 1 for signatures in by_count.values()), "a graph for each number"


def test_rows_a_batch_hold_about_the_sequences_of_the_users_batch() -> None:
    data = packing()
    assert data.packed.plan.sequences_per_row > 1.5
    assert data.rows_a_batch(data.packed) == round(4 / data.packed.plan.sequences_per_row) == 2
    assert packing(rows_per_batch=5).train_dataloader().batch_size == 5


class Ranked:
    """What a data module asks of a Trainer."""

    accumulate_grad_batches = 1

    def __init__(self, rank: int, world_size: int) -> None:
        self.global_rank, self.world_size = rank, world_size
        self.strategy = self
        self.root_device = torch.device("cpu")


@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_have_as_many_batches_and_share_the_sequences(shuffle: bool) -> None:
    shares, lengths, seen = [], [], []
    for rank in range(3):
        data = packing(pack_validation=True)
        data.trainer = Ranked(rank, 3)  # type: ignore[assignment]
        loader = data.train_dataloader() if shuffle else data.val_dataloader()
        shares += list(tokens_in(loader))
        lengths.append(len(loader))
        seen.append(loader.sequences_seen)
    assert sorted(shares) == sorted(tuple(sample["input_ids"].tolist()) for sample in Texts())
    assert len(set(lengths)) == 1
    assert seen == [41] * 3, "all ranks' together"


def test_validation_is_the_users_own_unless_asked_for() -> None:
    data = packing()
    data.setup("fit")
    assert "attention_mask" in next(iter(data.val_dataloader()))


class Plain(pl.LightningDataModule):
    """Has training data, a hook, and something that the model asks for."""

    vocabulary = VOCABULARY

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Texts(), batch_size=4)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "moved": torch.ones(())}


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.filterwarnings("ignore:.*but have no `val_dataloader`.*")
def test_what_else_the_users_module_has_stays() -> None:
    data = packing(Plain())
    assert data.vocabulary == VOCABULARY
    assert not hasattr(data, "facts")
    assert copy.copy(data).vocabulary == VOCABULARY
    hooks = ("on_before_batch_transfer", "on_after_batch_transfer")
    assert [is_overridden(hook, data) for hook in hooks] == [False, True], "the model's own are heard as before"

    class Moved(Trained):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert batch["moved"] == 1
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise AssertionError("there is no validation set")

    trainer(max_epochs=1).fit(module := Moved(), data)
    assert module.seen


class Keyed(Dataset[Any]):
    """Has another sample in each epoch, of the same length."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, key: SampleKey) -> dict[str, Tensor]:
        return sequence(1 + key.index, 100 * key.epoch + key.index)


class KeyedData(pl.LightningDataModule):
    def train_dataloader(self) -> ResumableLoader:
        return ResumableLoader(Keyed(), EpochOrder(9, shuffle=True, seed=0), batch_size=2)


def test_samples_are_asked_for_as_their_own_loader_does() -> None:
    loader = packing(KeyedData()).train_dataloader()
    loader.order.set_epoch(4)
    wanted = [tuple(sequence(1 + i, 400 + i)["input_ids"].tolist()) for i in range(9)]
    assert sorted(tokens_in(loader)) == sorted(wanted)


def test_long_sequences_are_an_error_unless_asked_for() -> None:
    long = Data(Texts(longest=20))
    with pytest.raises(
        DataError, match=r"^8 of 41 sequences are longer than a row of 16 tokens, the first of them sample"
    ):
        packing(long).train_dataloader()
    cut = packing(long, too_long="truncate")
    assert (cut.packed.truncated, cut.packed.skipped) == (8, 0)
    assert max(len(s) for s in tokens_in(cut.train_dataloader())) == MOST
    assert len(list(tokens_in(cut.train_dataloader()))) == 41
    without = packing(long, too_long="skip")
    assert (without.packed.truncated, without.packed.skipped) == (0, 8)
    wanted = sorted(tuple(s["input_ids"].tolist()) for s in Texts(longest=20) if len(s["input_ids"]) <= MOST)
    assert sorted(tokens_in(without.train_dataloader())) == wanted


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (
            Data(Stream(), shuffle=False),
            r"^Stream is an iterable data set, whose sequences can't be fetched by number: ",
        ),
        (
            Data(shuffle=False, sampler=WeightedRandomSampler([1.0] * 41, 41)),
            r"samples by a WeightedRandomSampler, and ",
        ),
        (
            Data(shuffle=False, sampler=RandomSampler(Texts(), replacement=True)),
            r"by a RandomSampler with replacement, ",
        ),
    ],
)
def test_loaders_that_cant_be_packed(inner: pl.LightningDataModule, message: str) -> None:
    with pytest.raises(OptimizationError, match=message):
        packing(inner).train_dataloader()


def test_a_data_set_that_changes_its_lengths() -> None:
    texts = Texts()
    data = packing(Data(texts))
    loader = data.train_dataloader()
    texts.longest = 5
    with pytest.raises(
        DataError, match=r"tokens, but had \d+ when the plan was made: a packed data set gives each sample"
    ):
        list(loader)


class SaveAt(pl.Callback):
    """Writes a checkpoint after a step."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.filterwarnings("ignore:.*val_dataloader.*")
def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    unbroken = Trained()
    trainer().fit(unbroken, packing(rows_per_batch=2))
    batches = len(unbroken.seen) // 2
    assert unbroken.seen[batches - 1][0] == 41
    assert unbroken.seen[-1][0] == 82
    for stop in (3, batches + 2):
        first = Trained()
        trainer(max_steps=stop, callbacks=[SaveAt(stop, tmp_path / "stopped.ckpt")]).fit(
            first, packing(rows_per_batch=2)
        )
        second = Trained()
        trainer().fit(second, packing(rows_per_batch=2), ckpt_path=tmp_path / "stopped.ckpt", weights_only=False)
        assert first.seen + second.seen == unbroken.seen
        for a, b in zip(second.parameters(), unbroken.parameters(), strict=True):
            assert torch.equal(a, b)
