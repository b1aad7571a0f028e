"""Sequences as a BERT has them, packed and unpacked, and what is trained on them."""

from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fasttrain.callbacks.sequence_packing import (
    SequencePackingDataModule,
    collate_rows,
    deal,
    format_of,
    histogram_of,
    make_plan,
    mean_loss,
    next_tokens,
    pack_row,
    packed_attention,
)
from fasttrain.callbacks.sequence_packing.rows import IGNORED, RowFormat
from fasttrain.environment import Hardware

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


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(Texts())


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
