"""Packed equals unpacked: loss and every gradient, over ranks and accumulated; and nothing leaks."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_sequences import (
    VOCABULARY,
    Encoder,
    Texts,
    Trained,
    length_sets,
    loss_and_gradients,
    loss_of,
    packed_batch,
    packing,
    sequences,
    trainer,
    unpacked_batch,
)
from torch import Tensor

from fasttrain.callbacks.sequence_packing import (
    mean_loss,
    mean_of_sequences,
    over_ranks,
)
from fasttrain.callbacks.sequence_packing.reference import TOLERANCE
from fasttrain.callbacks.sequence_packing.rows import IGNORED


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


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.filterwarnings("ignore:.*val_dataloader.*")
def test_a_short_window_at_an_epochs_end_is_the_mean_of_its_own_sequences() -> None:
    data = packing(rows_per_batch=3)
    batches = len(list(data.train_dataloader()))
    accumulate = batches - 1
    assert accumulate > 1
    kept: list[dict[str, Tensor]] = []

    class Keep(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, module: Trained, batch: Any, index: int) -> None:
            if index == batches - 1:  # the window's only one
                own = copy.deepcopy(module.encoder)
                own.zero_grad()
                loss_of(own, {name: value for name, value in batch.items() if name != "totals"}, "bert").backward()
                kept.append({name: p.grad.clone() for name, p in own.named_parameters() if p.grad is not None})

        def on_before_optimizer_step(self, trainer: pl.Trainer, module: Trained, optimizer: Any) -> None:
            named = module.encoder.named_parameters()
            kept.append({name: p.grad.clone() for name, p in named if p.grad is not None})

    fitted = trainer(accumulate_grad_batches=accumulate, max_epochs=1, callbacks=[Keep()])
    fitted.fit(Trained("bert"), packing(rows_per_batch=3))
    _, wanted, found = kept
    assert wanted.keys() == found.keys()
    for name in wanted:  # totals are float32
        torch.testing.assert_close(found[name], wanted[name], rtol=2e-7, atol=1e-8)
