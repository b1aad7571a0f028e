"""BERT's batches without padding: the same losses and gradients, and tokens dealt evenly over ranks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_processes import run_ranks
from torch import Tensor

from fasttrain.errors import ConfigError
from fasttrain.order import EpochOrder, SampleKey
from fasttrain.recipes.bert.bench import CorpusData
from fasttrain.recipes.bert.config import BertConfig
from fasttrain.recipes.bert.data import DataConfig, padded
from fasttrain.recipes.bert.masking import Masking
from fasttrain.recipes.bert.module import BertTraining, TrainingConfig
from fasttrain.recipes.bert.sequences import StoredSequences, writing
from fasttrain.recipes.bert.unpadding import ExchangedOrder, unpadded

WORDS, LONGEST = 60, 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = np.random.default_rng(0)
    path: Path = tmp_path_factory.mktemp("sequences")
    with writing(path, WORDS) as writer:
        for length in random.integers(4, LONGEST + 1, 64).tolist():
            tokens = random.integers(5, WORDS, length)
            writer.add(tokens, length // 2, int(tokens[0]) % 2)
    return path


def data_of(folder: Path, **options: Any) -> CorpusData:
    config = DataConfig(**{"batch_size": 8, "max_length": LONGEST, "max_predictions": 5, "num_workers": 0, **options})
    data = CorpusData(folder, config)
    stored = StoredSequences(folder, Masking(4, (2, 3), WORDS, most=5))
    data._sets = {"train": stored, "val": stored}
    data.setup = lambda stage: None  # type: ignore[method-assign]
    return data


def module() -> BertTraining:
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 32, "max_positions": LONGEST}
    config = BertConfig(vocab_size=WORDS, hidden_dropout=0.0, attention_dropout=0.0, **small)  # type: ignore[arg-type]
    return BertTraining(TrainingConfig(config)).double()


def gradients(batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor | None]]:
    model = module()
    losses = torch.stack(model.losses(model.outputs(batch), batch))
    losses.sum().backward()
    return losses.detach(), [parameter.grad for parameter in model.parameters()]


@settings(max_examples=6, deadline=None)
@given(indices=st.lists(st.integers(0, 63), min_size=1, max_size=7))
def test_unpadded_equals_padded(folder: Path, indices: list[int]) -> None:
    stored = StoredSequences(folder, Masking(4, (2, 3), WORDS, most=5))
    samples = [stored[SampleKey(0, index)] for index in indices]
    batch = unpadded(samples)
    tokens = sum(len(sample["input_ids"]) for sample in samples)
    assert batch["input_ids"].shape[0] == 1
    assert tokens <= batch["input_ids"].shape[1] < tokens + 64
    assert module().samples_in(batch) == len(samples)
    losses, found = gradients(batch)
    wanted_losses, wanted = gradients(padded(samples, LONGEST, 5))
    torch.testing.assert_close(losses, wanted_losses, rtol=1e-10, atol=0)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def keys(order: EpochOrder, epoch: int) -> list[int]:
    order.set_epoch(epoch)
    return [key.index for key in order]


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 512), min_size=12, max_size=60), ranks=st.integers(1, 4), batch=st.integers(1, 4),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_every_global_batch_has_the_samples_that_it_has_without(
    lengths: list[int], ranks: int, batch: int, seed: int
) -> None:
    options = [
        {"shuffle": True, "seed": seed, "rank": rank, "world_size": ranks, "even": True} for rank in range(ranks)
    ]
    exchanged = [ExchangedOrder(np.array(lengths), batch, **each) for each in options]
    plain = [EpochOrder(len(lengths), **each) for each in options]  # type: ignore[arg-type]
    for epoch in (0, 3):
        found, wanted = ([keys(order, epoch) for order in orders] for orders in (exchanged, plain))
        assert [len(each) for each in found] == [len(each) for each in wanted]
        for begin in range(0, len(found[0]), batch):
            parts = [[each[begin : begin + batch] for each in of] for of in (found, wanted)]
            together, wanted_together = (sorted(index for part in of for index in part) for of in parts)
            assert together == wanted_together
            counts = [sum(lengths[index] for index in part) for part in parts[0]]
            assert max(counts) - min(counts) <= max(lengths[index] for index in together)
        order = exchanged[-1]
        order.first = 2 * batch  # as a resumed loader sets it
        assert keys(order, epoch) == found[-1][2 * batch :]
        order.first = 0


def test_exchange_needs_unpadding() -> None:
    with pytest.raises(ConfigError, match=r"exchange_padding is set without data\.unpadding: .*; set both\."):
        DataConfig(exchange_padding=True)


def step_on_a_rank(folder: Path, rank: int, exchange: bool) -> tuple[list[int], list[Any]]:
    """Return a rank's tokens by step, and the weights after three steps of plain data parallelism."""
    torch.set_num_threads(1)
    data = data_of(folder, unpadding=True, exchange_padding=exchange)
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    data.trainer = SimpleNamespace(global_rank=rank, world_size=2, strategy=strategy)  # type: ignore[assignment]
    model, tokens = module(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in list(data.train_dataloader())[:3]:
        tokens.append(int(batch["sequence_lengths"].sum()))
        optimizer.zero_grad()
        sum(model.losses(model.outputs(batch), batch)).backward()  # type: ignore[union-attr]
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= 2  # type: ignore[operator]
        optimizer.step()
    return tokens, [parameter.detach().numpy() for parameter in model.parameters()]


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="a process that uses CUDA can't be forked")
def test_two_ranks_train_the_same_with_about_as_many_tokens_each(folder: Path) -> None:
    answers = run_ranks(2, lambda rank: [step_on_a_rank(folder, rank, exchange) for exchange in (False, True)])
    (plain, exchanged), (plain_1, exchanged_1) = answers
    differences = [
        max(abs(a - b) for a, b in zip(one[0], other[0], strict=True))
        for one, other in ((plain, plain_1), (exchanged, exchanged_1))
    ]
    assert differences[1] <= 8 < differences[0], "sequences of 4 to 32 tokens, 8 on each rank"
    for one, other in zip(plain[1], exchanged[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-8)  # counts of targets are float32
    for one, other in zip(exchanged[1], exchanged_1[1], strict=True):
        np.testing.assert_array_equal(one, other)
