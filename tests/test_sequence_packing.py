"""Packed equals unpacked: loss and every gradient, in rows, batches, data modules, fits and resumed fits."""

import copy
import inspect
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

from fasttrain.batches import flatten
from fasttrain.callbacks.sequence_packing import (
    SequencePackingConfig,
    SequencePackingDataModule,
    SequencePackingOptimization,
    attention,
    block_diagonal,
    collate_rows,
    deal,
    format_of,
    histogram_of,
    make_plan,
    mask_of_rows,
    mean_loss,
    mean_of_sequences,
    next_tokens,
    over_ranks,
    pack_row,
    pack_stream,
    packed_attention,
)
from fasttrain.callbacks.sequence_packing.reference import TOLERANCE, attention_reference
from fasttrain.callbacks.sequence_packing.rows import IGNORED, RowFormat
from fasttrain.environment import Hardware
from fasttrain.errors import DataError, MissingDependencyError, OptimizationError
from fasttrain.optimization import Applies, Context, Refuses
from fasttrain.order import EpochOrder, ResumableLoader, SampleKey

MOST, VOCABULARY = 16, 11
CPU = Hardware("cpu", "cpu", "a CPU", 2)
length_sets = st.lists(st.integers(1, MOST), min_size=1, max_size=9)


def sequence(length: int, seed: int) -> dict[str, Tensor]:
    """Return a sequence as a BERT has it: a few tokens masked, and a label of the whole."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCABULARY, (length,), generator=random)
    count = 1 + int(torch.randint(0, max(1, length // 4), (), generator=random))
    places = torch.randperm(length, generator=random)[:count].sort().values
    labels = torch.full((length,), IGNORED)
    labels[places] = tokens[places]
    return {
        "input_ids": tokens,
        "token_type_ids": torch.arange(length) // (1 + length // 2),
        "labels": labels,
        "masked_lm_positions": places,
        "masked_lm_ids": tokens[places],
        "next_sentence_label": torch.randint(0, 2, (), generator=random),
    }


def sequences(lengths: list[int], seed: int = 0) -> list[dict[str, Tensor]]:
    return [sequence(length, 100 * seed + number) for number, length in enumerate(lengths)]


def bert_format(samples: list[dict[str, Tensor]], **options: Any) -> RowFormat:
    return format_of(
        max(samples, key=lambda sample: len(sample["input_ids"])), length_key="input_ids",
        **{"max_length": MOST, "max_sequences": 3, "positions": ("masked_lm_positions",), "lists": ("masked_lm_ids",),
           "list_capacity": 12, **options},
    )  # fmt: skip


def packed_batch(samples: list[dict[str, Tensor]], static: bool = True) -> dict[str, Tensor]:
    lengths = np.array([len(sample["input_ids"]) for sample in samples])
    form = bert_format(samples)
    members = deal(make_plan(histogram_of(lengths, MOST), max_length=MOST), lengths, seed=0)
    rows = [pack_row([samples[i] for i in row if i >= 0], form) for row in members.tolist()]
    return collate_rows(rows, form, static=static)


def unpacked_batch(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad as a plain collate function would, with a mask of the tokens that are there."""
    form = bert_format(samples)

    def padded(name: str, fill: int) -> Tensor:
        return nn.utils.rnn.pad_sequence([sample[name] for sample in samples], batch_first=True, padding_value=fill)

    batch = {name: padded(name, int(fill)) for name, fill in {**form.tokens, **form.lists}.items()}
    batch["attention_mask"] = padded("input_ids", 0) > 0
    batch["next_sentence_label"] = torch.stack([sample["next_sentence_label"] for sample in samples])
    return batch


class Encoder(nn.Module):
    """Two layers of attention and feed-forward, with a head by token and one by sequence. Takes either batch."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.words, self.places, self.types = nn.Embedding(VOCABULARY, 8), nn.Embedding(MOST, 8), nn.Embedding(2, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(4))
        self.qkv = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))
        self.by_token, self.by_sequence = nn.Linear(8, VOCABULARY), nn.Linear(8, 2)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        tokens = batch["input_ids"]
        positions = batch.get("position_ids", torch.arange(tokens.shape[1]))
        x = self.words(tokens) + self.places(positions) + self.types(batch["token_type_ids"])
        for layer in range(2):
            x = self.norms[2 * layer](x + self.out[layer](self.attend(self.qkv[layer](x), batch)))
            x = self.norms[2 * layer + 1](x + self.mlp[layer](x))
        return x

    def attend(self, qkv: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        rows, length, _ = qkv.shape
        if "cu_seqlens" in batch:
            query, key, value = qkv.view(rows * length, 3, 2, 4).unbind(1)
            found = packed_attention(query, key, value, batch["cu_seqlens"], length, causal=self.causal, rows=rows)
            return found.reshape(rows, length, 8)
        query, key, value = qkv.view(rows, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mask = batch["attention_mask"][:, None, None]
        mask = mask & torch.ones(length, length, dtype=torch.bool).tril() if self.causal else mask
        return (
            nn.functional.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).reshape(rows, length, 8)
        )


def loss_of(model: Encoder, batch: Mapping[str, Any], kind: str) -> Tensor:
    hidden = model(batch)
    packed = "cu_seqlens" in batch
    totals = batch.get("totals", {})
    if kind == "causal":
        ids = batch["sequence_ids"] if packed else batch["attention_mask"].int()
        return mean_loss(model.by_token(hidden), next_tokens(batch["input_ids"], ids), totals.get("next_tokens"))
    first = hidden.flatten(0, 1)[batch["sequence_starts"]] if packed else hidden[:, 0]
    nsp = mean_loss(model.by_sequence(first), batch["next_sentence_label"], totals.get("next_sentence_label"))
    if kind == "nsp":
        return nsp
    mlm = mean_loss(model.by_token(hidden), batch["labels"], totals.get("labels"))
    places = batch["masked_lm_positions"][:, :, None].expand(-1, -1, 8)
    gathered = mean_loss(model.by_token(hidden.gather(1, places)), batch["masked_lm_ids"], totals.get("masked_lm_ids"))
    torch.testing.assert_close(gathered, mlm)  # the same tokens, by place in the row
    return mlm + (gathered + nsp if kind == "bert" else 0)


def loss_and_gradients(model: Encoder, batch: Mapping[str, Tensor], kind: str) -> list[Tensor]:
    model.zero_grad()
    loss = loss_of(model, batch, kind)
    loss.backward()
    zero = torch.zeros(())
    return [loss.detach(), *(zero if p.grad is None else p.grad.clone() for p in model.parameters())]


@settings(max_examples=15, deadline=None)
@given(lengths=length_sets, kind=st.sampled_from(["mlm", "nsp", "bert", "causal"]), static=st.booleans(),
       seed=st.integers(0, 99))  # fmt: skip
def test_packed_equals_unpacked(lengths: list[int], kind: str, static: bool, seed: int) -> None:
    torch.manual_seed(seed)
    model, samples = Encoder(causal=kind == "causal").double(), sequences(lengths, seed)
    plain = loss_and_gradients(model, unpacked_batch(samples), kind)
    packed = loss_and_gradients(model, packed_batch(samples, static), kind)
    for found, wanted in zip(packed, plain, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE[torch.float64])


@pytest.mark.parametrize("causal", [False, True])
def test_nothing_leaks_from_one_sequence_to_another(causal: bool) -> None:
    torch.manual_seed(0)
    model, samples = Encoder(causal).double(), sequences([5, 7, 4, 9, 3, 16, 2])
    batch = packed_batch(samples)
    before = model(batch)
    for row in range(len(batch["input_ids"])):
        for number in range(4):  # 0 is the padding
            changed = {name: value.clone() for name, value in batch.items()}
            inside = torch.zeros_like(batch["sequence_ids"], dtype=torch.bool)
            inside[row] = batch["sequence_ids"][row] == number
            changed["input_ids"][inside] = (changed["input_ids"][inside] + 3) % VOCABULARY
            after = model(changed)
            assert torch.equal(after[~inside], before[~inside]), "not one bit of any other"
            assert not inside.any() or not torch.equal(after[inside], before[inside])


def test_no_gradient_comes_from_padding() -> None:
    torch.manual_seed(0)
    model, batch = Encoder().double(), packed_batch(sequences([5, 7, 9]))
    kept: list[Tensor] = []
    model.words.register_forward_hook(lambda module, inputs, output: kept.append(output))
    model.words.weight.requires_grad_()
    loss = loss_of(model, batch, "bert")
    (gradient,) = torch.autograd.grad(loss, kept)
    padding = batch["sequence_ids"] == 0
    assert padding.any()
    assert not gradient[padding].any()
    assert gradient[~padding].any()


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), causal=st.booleans())
def test_attention_equals_sequence_by_sequence(lengths: list[int], causal: bool) -> None:
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    made = [torch.randn(sum(lengths), 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    there = [length for length in lengths if length]
    for scale in (None, 0.3):
        found = packed_attention(*made, offsets, max(lengths), causal=causal, scale=scale)
        wanted = attention_reference(*made, there, causal=causal, scale=scale)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
        upstream = torch.randn_like(wanted)
        for a, b in zip(
            torch.autograd.grad(found, made, upstream), torch.autograd.grad(wanted, made, upstream), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash-attn is installed")
def test_flash_attn_that_is_not_installed() -> None:
    part, offsets = torch.zeros(2, 1, 8), torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(MissingDependencyError, match=r"needs the package flash-attn; `pip install fl"):
        packed_attention(part, part, part, offsets, 2, backend="flash_attn")


def test_torchs_kernel_is_asked_as_its_version_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def newer(query: Tensor, *_: Any, scale: Any = None, window_size: Any = (-1, -1)) -> Tensor:
        asked.append({"query": query, "scale": scale, "window": window_size})
        return query

    def older(query: Tensor, *_: Any, is_causal: bool = False) -> Tensor:
        asked.append({"query": query, "causal": is_causal})
        return query

    part, offsets = torch.ones(2, 1, 4), torch.tensor([0, 2], dtype=torch.int32)
    for function in (newer, older):
        monkeypatch.setattr(attention, "varlen", SimpleNamespace(varlen_attn=function))
        monkeypatch.setattr(attention, "VARLEN_OPTIONS", frozenset(inspect.signature(function).parameters))
        packed_attention(part, part, part, offsets, 2, causal=True, scale=1.0, backend="varlen")
    assert (asked[0]["scale"], asked[0]["window"]) == (1.0, (-1, 0))
    assert asked[1]["causal"]
    assert asked[1]["query"].tolist() == (2 * part).tolist(), "the scale it knows is 1 / sqrt(4)"


@pytest.mark.parametrize("causal", [False, True])
def test_masks_by_offsets_and_by_rows_are_the_same(causal: bool) -> None:
    batch = packed_batch(sequences([5, 7, 4, 9, 3, 16, 2]))
    rows = len(batch["input_ids"])
    by_row = mask_of_rows(batch["sequence_ids"], causal=causal)
    whole = block_diagonal(batch["cu_seqlens"], rows * MOST, causal=causal).view(rows, MOST, rows, MOST)
    for row in range(rows):
        assert torch.equal(whole[row, :, row], by_row[row, 0])
        assert not whole[row, :, torch.arange(rows) != row].any()


def test_what_a_row_holds() -> None:
    one, other = sequence(5, 1), sequence(7, 2)
    row = pack_row([one, other], bert_format([one, other]))
    assert row["input_ids"].tolist() == [*one["input_ids"].tolist(), *other["input_ids"].tolist(), 0, 0, 0, 0]
    assert row["labels"][12:].tolist() == [IGNORED] * 4
    assert row["position_ids"].tolist() == [*range(5), *range(7), 0, 0, 0, 0]
    assert row["sequence_ids"].tolist() == [1] * 5 + [2] * 7 + [0] * 4
    assert row["sequence_lengths"].tolist() == [5, 7, 0]
    assert row["next_sentence_label"].tolist() == [
        int(one["next_sentence_label"]),
        int(other["next_sentence_label"]),
        -100,
    ]
    places = [*one["masked_lm_positions"].tolist(), *(other["masked_lm_positions"] + 5).tolist()]
    assert row["masked_lm_positions"].tolist() == places + [0] * (12 - len(places))
    assert (
        row["input_ids"][row["masked_lm_positions"][: len(places)]].tolist()
        == row["masked_lm_ids"][: len(places)].tolist()
    )
    assert row["masked_lm_ids"][len(places) :].eq(IGNORED).all()


def test_offsets_have_room_for_every_batch_and_the_same_shape() -> None:
    samples = sequences([5, 7, 16, 4, 3, 2])
    form = bert_format(samples)
    rows = [pack_row([samples[i] for i in row], form) for row in ([0, 1], [2], [3, 4, 5], [])]
    batch = collate_rows(rows, form)
    assert batch["cu_seqlens"].tolist() == [0, 5, 12, 16, 16, 32, 32, 32, 32, 36, 39, 41, 48, 64, 64, 64, 64]
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["sequence_starts"].tolist() == [[0, 5, 0], [16, 0, 0], [32, 36, 39], [0, 0, 0]]
    assert batch["num_sequences"] == 6
    by_count = collate_rows(rows, form, static=False)
    assert by_count["cu_seqlens"].tolist() == [0, 5, 12, 16, 32, 32, 36, 39, 41, 48, 64]
    assert by_count["sequence_starts"].tolist() == [0, 5, 16, 32, 36, 39]
    assert by_count["sequence_lengths"].tolist() == [5, 7, 16, 4, 3, 2]
    assert by_count["next_sentence_label"].tolist() == [int(s["next_sentence_label"]) for s in samples]


def test_values_may_be_lists_numbers_arrays_and_vectors_by_token() -> None:
    samples = [{"ids": [1, 2, 3], "features": np.ones((3, 2), np.float32), "weight": 0.5, "class_label": 4}]
    form = format_of(samples[0], length_key="ids", max_length=5, max_sequences=2, padding={"weight": 0.0})
    row = pack_row(samples, form)
    assert row["features"].tolist() == [[1, 1]] * 3 + [[0, 0]] * 2
    assert row["weight"].tolist() == [0.5, 0.0]
    assert row["class_label"].tolist() == [4, IGNORED]
    empty = pack_row([], form)
    assert {name: (v.shape, v.dtype) for name, v in empty.items()} == {
        name: (v.shape, v.dtype) for name, v in row.items()
    }


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            {"position_ids": [0, 1]},
            r"^samples have a 'position_ids', which packing makes anew for each row; leave it out",
        ),
        ({"attention_mask": [1, 1]}, r"^samples have an 'attention_mask': one entry a token does not keep packed seq"),
        (
            {"text": "a b"},
            r"^'text' is a str, but the sample has 2 tokens \('input_ids'\): neither one entry a token nor",
        ),
        (
            {"spans": [1, 2, 3]},
            r"^'spans' is of shape \[3\], but the sample has 2 tokens .* Name it in `lists`, in `pos",
        ),
    ],
)
def test_values_that_fit_in_no_row(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        format_of({"input_ids": [1, 2], **extra}, length_key="input_ids", max_length=8, max_sequences=3)


def test_rows_that_samples_do_not_fit_in() -> None:
    samples = sequences([9, 8])
    form = bert_format(samples, list_capacity=1)
    with pytest.raises(
        DataError, match=r"^sequences of 9, 8 tokens do not fit in a row of 16 tokens and 3 sequences\.$"
    ):
        pack_row(samples, form)
    many = {**sequence(9, 0), "masked_lm_positions": torch.arange(3), "masked_lm_ids": torch.arange(3)}
    with pytest.raises(
        DataError, match=r"^a row has 3 entries of 'masked_lm_ids', but room for 1; set list_capacity to 3"
    ):
        pack_row([many], form)
    with pytest.raises(
        DataError, match=r"^'labels' has not one entry for each token of its sequence, as it has in the"
    ):
        pack_row([{**many, "labels": torch.zeros(4)}], form)
    del many["labels"]
    with pytest.raises(DataError, match=r"^a sample has no 'labels', which the first one has\.$"):
        pack_row([many], form)
    with pytest.raises(DataError, match=r"^'spans' is named as a list, but samples have input_ids, "):
        bert_format(samples, lists=("spans",))


def test_a_shortened_sample_keeps_the_targets_that_still_have_a_place() -> None:
    sample = {
        **sequence(20, 0),
        "masked_lm_positions": torch.tensor([2, 15, 16]),
        "masked_lm_ids": torch.tensor([7, 8, 9]),
    }
    cut = bert_format([sample]).shortened(sample)
    assert len(cut["input_ids"]) == len(cut["labels"]) == MOST
    assert cut["masked_lm_positions"].tolist() == [2, 15]
    assert cut["masked_lm_ids"].tolist() == [7, 8]


def test_the_mean_of_sequences_is_that_of_each_alone() -> None:
    samples = sequences([5, 7, 4, 9, 3, 16, 2])
    batch = packed_batch(samples)
    losses = torch.rand(batch["labels"].shape, dtype=torch.float64)
    there = batch["labels"] != IGNORED
    means = [
        losses[row][here & there[row]].mean()
        for row in range(len(losses)) for number in (1, 2, 3)
        if (here := batch["sequence_ids"][row] == number).any()
    ]  # fmt: skip
    assert len(means) == 7
    found = mean_of_sequences(losses, there, batch["sequence_ids"])
    torch.testing.assert_close(found, torch.stack(means).mean())
    counted = mean_of_sequences(losses, there, batch["sequence_ids"], torch.tensor(14.0))
    torch.testing.assert_close(counted, torch.stack(means).sum() / 14)


def test_a_batch_without_targets_has_no_loss() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    for total in (None, torch.tensor(0.0)):
        loss = mean_loss(logits, torch.full((3,), IGNORED), total)
        assert loss == 0
        assert not torch.autograd.grad(loss, logits)[0].any()
    assert over_ranks(torch.tensor(3.0)) == 3, "one process has all of them"


def test_a_stream_is_packed_within_its_window() -> None:
    samples = sequences([1 + (7 * i) % MOST for i in range(50)])
    rows = list(pack_stream(iter(samples), bert_format(samples), window=20, seed=1))
    found = [length for row in rows for length in row["sequence_lengths"].tolist() if length]
    assert sorted(found) == sorted(len(sample["input_ids"]) for sample in samples)
    assert len(rows) < 40


class Texts(Dataset[Any]):
    """Sequences whose lengths are told by their number."""

    def __init__(self, size: int = 41, longest: int = MOST) -> None:
        self.size, self.longest = size, longest

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return sequence(1 + (7 * index) % self.longest, index)


class Data(pl.LightningDataModule):
    def __init__(self, dataset: Any = None, **options: Any) -> None:
        super().__init__()
        self.dataset, self.options = dataset or Texts(), {"batch_size": 4, "shuffle": True, **options}

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.dataset, collate_fn=unpacked_batch, **self.options)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.dataset, batch_size=4, collate_fn=unpacked_batch)


def packing(inner: pl.LightningDataModule | None = None, **options: Any) -> SequencePackingDataModule:
    return SequencePackingDataModule(
        inner or Data(), MOST, **{"lists": ("masked_lm_ids",), "positions": ("masked_lm_positions",), "seed": 3,
                                  "list_capacity": 12, **options},
    )  # fmt: skip


def tokens_in(batches: Any) -> Iterator[tuple[int, ...]]:
    """Yield the tokens of each sequence."""
    for batch in batches:
        for ids, row in zip(batch["sequence_ids"], batch["input_ids"], strict=True):
            yield from (tuple(row[ids == number].tolist()) for number in range(1, int(ids.max()) + 1))


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


def on_a_rank(rank: int, folder: str) -> None:
    """Compute a rank's loss, have gradients averaged as DDP does, and write them down."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = Encoder().double()
    batch: dict[str, Any] = packed_batch(sequences([[5, 3, 7, 16], [2]][rank], rank))
    counts = {
        name: (batch[name] != IGNORED).sum().float() for name in ("labels", "masked_lm_ids", "next_sentence_label")
    }
    batch["totals"] = {name: over_ranks(count) for name, count in counts.items()}
    loss_of(model, batch, "bert").backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for gradient in gradients:
        torch.distributed.all_reduce(gradient)
        gradient /= 2
    torch.save(gradients, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="a process that uses CUDA can't be forked")
def test_two_ranks_with_unequal_counts_have_the_mean_of_all(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(on_a_rank, (str(tmp_path),), nprocs=2, start_method="fork")
    torch.manual_seed(0)
    model = Encoder().double()
    batch = unpacked_batch(sequences([5, 3, 7, 16], 0) + sequences([2], 1))
    loss_of(model, batch, "bert").backward()
    wanted = [p.grad for p in model.parameters() if p.grad is not None]
    for rank in range(2):
        for found, gradient in zip(torch.load(tmp_path / f"{rank}.pt"), wanted, strict=True):
            torch.testing.assert_close(found, gradient, rtol=2e-7, atol=1e-9)  # counts are float32


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


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(Texts())


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


class Trained(pl.LightningModule):
    """Trains an encoder on packed or unpacked batches; notes what it saw."""

    fasttrain_packed_rows = True

    def __init__(self, kind: str = "bert") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.kind = Encoder(causal=kind == "causal").double(), kind
        self.seen: list[tuple[int, list[int]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if "sequence_ids" in batch and self._trainer is not None:
            self.seen.append((self.trainer.datamodule.sequences_seen, batch["input_ids"].flatten().tolist()))  # type: ignore[attr-defined]
        return loss_of(self.encoder, batch, self.kind)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def trainer(**options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        **{"enable_checkpointing": False, "max_epochs": 2, **options},
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.filterwarnings("ignore:.*val_dataloader.*")
@pytest.mark.parametrize("kind", ["bert", "causal"])
def test_an_accumulated_step_equals_one_of_all_its_sequences(kind: str) -> None:
    data = packing(rows_per_batch=3)
    steps = len(data.train_dataloader())
    assert steps > 2
    whole = Trained(kind)
    batch = unpacked_batch(list(Texts()))
    loss_of(whole.encoder, batch, kind).backward()
    packed = Trained(kind)
    kept: dict[str, Tensor] = {}

    class Keep(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
            kept.update({name: p.grad.clone() for name, p in pl_module.named_parameters() if p.grad is not None})

    trainer(accumulate_grad_batches=steps, max_epochs=1, callbacks=[Keep()]).fit(packed, packing(rows_per_batch=3))
    for name, parameter in whole.named_parameters():
        if parameter.grad is not None:
            # Totals are kept in float32, whose rounding is 6e-8.
            torch.testing.assert_close(kept[name], parameter.grad, rtol=2e-7, atol=1e-9)


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


def optimization(**options: Any) -> SequencePackingOptimization:
    values = {"max_length": MOST, "lists": ["masked_lm_ids"], "positions": ["masked_lm_positions"], "list_capacity": 12}
    return SequencePackingOptimization(SequencePackingConfig(**{**values, **options}))


def checked(module: pl.LightningModule, data: pl.LightningDataModule | None = None, **options: Any) -> Any:
    return optimization(**options).check(Context(module, data or Data(), CPU))


def test_the_plan_says_what_it_will_do() -> None:
    asked = optimization(seed=3)
    verdict = asked.check(context := Context(Trained(), Data(), CPU))
    assert isinstance(verdict, Applies), verdict
    assert verdict.note.startswith("41 sequences in ")
    assert "expected speed-up 1.8" in verdict.note
    data = asked.attach(context).data
    assert isinstance(data, SequencePackingDataModule)
    (change,) = asked.applied()
    assert (change.path, change.count) == ("data.train_dataloader", data.packed.plan.rows)
    assert len(list(tokens_in(data.train_dataloader()))) == 41


def test_what_was_cut_off_is_told() -> None:
    asked = optimization(too_long="truncate")
    assert isinstance(asked.check(Context(Trained(), Data(Texts(longest=20)), CPU)), Applies)
    assert [(change.what, change.count) for change in asked.applied()][1:] == [("sequences cut off", 8)]


class Silent(Trained):
    fasttrain_packed_rows = False


class Leaky(Trained):
    """Forgets where sequences begin and end."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = len(batch["input_ids"])
        return super().training_step(
            {**batch, "cu_seqlens": torch.arange(rows + 1, dtype=torch.int32) * MOST}, batch_idx
        )


class Running(Trained):
    """Goes on counting positions from one sequence to the next."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        positions = torch.arange(MOST).expand_as(batch["input_ids"])
        return super().training_step({**batch, "position_ids": positions}, batch_idx)


class Asking(Trained):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.trainer.max_epochs  # type: ignore[operator]


@pytest.mark.parametrize(
    ("module", "data", "options", "message"),
    [
        (Silent, None, {}, "Silent does not say that it keeps the sequences of a row apart; "),
        (Leaky, None, {}, "Leaky does not treat packed sequences as it treats each in a row of its own: loss "),
        (Running, None, {}, "Running does not treat packed sequences as it treats each in a row of its own: "),
        (Asking, None, {}, "the step of Asking could not be tried on packed rows outside of a Trainer (RuntimeError: "),
        (Trained, Data(Texts(longest=20)), {}, "8 of 41 sequences are longer than a row of 16 tokens, "),
        (
            Trained,
            Data([sequence(15, i) for i in range(9)]),
            {},
            "9 sequences fill 93.8% of rows of 16 tokens by thems",
        ),
        (Trained, Data(Stream(), shuffle=False), {}, "Stream is an iterable data set, "),
        (Trained, pl.LightningDataModule(), {}, "LightningDataModule gives no training loader to plan with before the"),
        (Trained, None, {"length_key": "ids"}, "sample 0 has no 'ids', whose length says how many tokens it has; "),
    ],
)
def test_it_refuses_with_a_reason(module: Any, data: Any, options: dict[str, Any], message: str) -> None:
    verdict = checked(module(), data, **options)
    assert isinstance(verdict, Refuses)
    assert verdict.reason.startswith(message)
    assert not verdict.reason.endswith(".")


def test_a_trial_may_be_left_out_and_changes_nothing() -> None:
    assert isinstance(checked(Leaky(), trial=False), Applies)
    module = Trained()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.random.get_rng_state()
    assert isinstance(checked(module), Applies)
    assert torch.equal(state, torch.random.get_rng_state())
    assert module.training
    assert all(p.grad is None for p in module.parameters())
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
