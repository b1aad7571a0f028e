"""BERT on packed rows is BERT on padded ones: both losses, every gradient, and nothing seen of other sequences."""

from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

from fasttrain.callbacks.sequence_packing import (
    SequencePackingConfig,
    SequencePackingOptimization,
    collate_rows,
    deal,
    format_of,
    histogram_of,
    make_plan,
    pack_row,
)
from fasttrain.callbacks.sequence_packing.reference import TOLERANCE
from fasttrain.environment import Hardware
from fasttrain.optimization import Applies, Context
from fasttrain.recipes.bert.config import BertConfig
from fasttrain.recipes.bert.data import LISTS, POSITIONS, padded
from fasttrain.recipes.bert.masking import Masking
from fasttrain.recipes.bert.module import BertTraining, TrainingConfig

MOST, WORDS = 24, 40
MASKING = Masking(mask_id=4, special=(2, 3), vocab_size=WORDS, most=4)


def bert(**options: Any) -> BertTraining:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": WORDS, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 24,
        "max_positions": MOST, "init_std": 0.2, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    }  # fmt: skip
    return BertTraining(TrainingConfig(BertConfig(**{**sizes, **options}))).double()


def pair(length: int, seed: int) -> dict[str, Tensor]:
    """Return a masked pair of sentences."""
    random = np.random.default_rng(seed)
    tokens = random.integers(5, WORDS, length)
    tokens[0], tokens[-1] = 2, 3
    tokens, places, words = MASKING(tokens, 0, seed)
    return {
        "input_ids": torch.from_numpy(tokens),
        "token_type_ids": (torch.arange(length) > length // 2).long(),
        "masked_lm_positions": torch.from_numpy(places),
        "masked_lm_ids": torch.from_numpy(words),
        "next_sentence_label": torch.tensor(int(random.integers(2))),
    }


def packed(samples: list[dict[str, Tensor]]) -> dict[str, Any]:
    lengths = np.array([len(sample["input_ids"]) for sample in samples])
    longest = max(samples, key=lambda sample: len(sample["input_ids"]))
    form = format_of(
        longest, length_key="input_ids", max_length=MOST, max_sequences=3, lists=LISTS, positions=POSITIONS,
        list_capacity=8,
    )  # fmt: skip
    members = deal(make_plan(histogram_of(lengths, MOST), max_length=MOST), lengths, seed=0)
    return collate_rows([pack_row([samples[i] for i in row if i >= 0], form) for row in members.tolist()], form)


def losses_and_gradients(module: BertTraining, batch: dict[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for loss in module.losses(module.outputs(batch), batch):
        module.zero_grad()
        loss.backward(retain_graph=True)
        zero = torch.zeros(())
        found += [loss.detach(), *(zero if p.grad is None else p.grad.clone() for p in module.parameters())]
    return found


@settings(max_examples=12, deadline=None)
@given(lengths=st.lists(st.integers(4, MOST), min_size=1, max_size=9), seed=st.integers(0, 99), fused=st.booleans())
def test_packed_equals_padded_for_words_and_relations(lengths: list[int], seed: int, fused: bool) -> None:
    module = bert(fused_qkv=fused)
    samples = [pair(length, 100 * seed + number) for number, length in enumerate(lengths)]
    wanted = losses_and_gradients(module, padded(samples, MOST, 8))
    found = losses_and_gradients(module, packed(samples))
    assert len(found) == 2 * (1 + len(list(module.parameters())))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE[torch.float64])


def test_a_changed_sequence_changes_no_other() -> None:
    module = bert()
    batch = packed([pair(length, number) for number, length in enumerate([9, 7, 8, 12, 10, 5, 20])])
    places, related = batch["masked_lm_positions"], batch["sequence_lengths"] > 0
    owner = batch["sequence_ids"].gather(1, places).where(batch["masked_lm_ids"] >= 0, -1)
    words, relations = module.outputs(batch)
    several = 0
    for row, number in [(row, n) for row in range(len(places)) for n in range(4)]:  # 0 is the padding
        inside = torch.zeros_like(batch["sequence_ids"], dtype=torch.bool)
        inside[row] = batch["sequence_ids"][row] == number
        changed = {**batch, "input_ids": batch["input_ids"].clone(), "token_type_ids": batch["token_type_ids"].clone()}
        changed["input_ids"][inside] = (changed["input_ids"][inside] + 3) % WORDS
        changed["token_type_ids"][inside] = 1 - changed["token_type_ids"][inside]
        of_it = torch.zeros_like(owner, dtype=torch.bool)
        of_it[row] = owner[row] == number
        its_relation = torch.zeros_like(related)
        its_relation[row, max(0, number - 1)] = number > 0
        after_words, after_relations = module.outputs(changed)
        others = (owner > 0) & ~of_it
        assert torch.equal(after_words[others], words[others]), "not one bit"
        assert torch.equal(after_relations[related & ~its_relation], relations[related & ~its_relation])
        if of_it.any():
            several += 1
            assert not torch.equal(after_words[of_it], words[of_it])
            assert not torch.equal(after_relations[its_relation], relations[its_relation])
    assert several == 7


class Pairs(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        samples: Any = [pair(4 + 5 * number % (MOST - 3), number) for number in range(30)]
        return DataLoader(samples, batch_size=6, shuffle=True, collate_fn=lambda s: padded(s, MOST, 8))


def test_the_rooms_own_trial_agrees() -> None:
    config = SequencePackingConfig(MOST, lists=list(LISTS), positions=list(POSITIONS), list_capacity=8)
    verdict = SequencePackingOptimization(config).check(Context(bert(), Pairs(), Hardware("cpu", "cpu", "a CPU", 2)))
    assert isinstance(verdict, Applies), verdict


@pytest.mark.parametrize("attention", ["dense", "auto"])
def test_with_dropout_a_step_has_a_loss_and_gradients(attention: str) -> None:
    module = bert(hidden_dropout=0.1, attention_dropout=0.1, attention=attention).train()
    module.training_step(packed([pair(9, 0), pair(7, 1), pair(20, 2)]), 0).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
