"""Ranks that evaluate unequal numbers of batches: DDP takes over buffers once an evaluation, not before every batch."""

import os
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from graph_fits import Small, batches
from lightning.pytorch.strategies import DDPStrategy
from rank_processes import run_ranks

from fasttrain.callbacks import CUDAGraphStep
from fasttrain.ranks_together import RanksTogether

pytestmark = pytest.mark.skipif(torch.cuda.is_initialized(), reason="a process that uses CUDA can't be forked")


class Evaluates(Small):
    """Its normalization learns, so DDP has buffers to take over."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])


def fit(rank: int, counts: tuple[int, int], graph: bool) -> dict[str, Any]:
    os.environ.update(MASTER_ADDR="127.0.0.1", LOCAL_RANK=str(rank), NODE_RANK="0")
    torch.manual_seed(0)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="gloo"), logger=False, max_epochs=1,
        callbacks=[CUDAGraphStep(stand_in=True)] if graph else [RanksTogether(grace_seconds=1)], val_check_interval=8,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        limit_val_batches=0 if counts == (0, 0) else None,
    )  # fmt: skip
    module = Evaluates()
    trainer.fit(module, batches(24, seed=rank), batches(counts[rank], seed=5))
    return {name: value.tolist() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("graph", [False, True])
def test_ranks_may_evaluate_unequal_numbers_of_batches(graph: bool) -> None:
    first, second = run_ranks(2, lambda rank: fit(rank, (3, 1), graph))
    weights = [name for name in first if "running" not in name and "num_batches" not in name]
    assert {name: first[name] for name in weights} == {name: second[name] for name in weights}
    if graph:
        alone, _ = run_ranks(2, lambda rank: fit(rank, (0, 0), graph))
        assert first == alone, "an evaluation changes nothing in training"


def test_a_rank_without_any_batch_ends_all(capfd: pytest.CaptureFixture[str]) -> None:
    _, second = run_ranks(2, lambda rank: fit(rank, (2, 0), graph=False))
    assert isinstance(second, RuntimeError)
    assert "zero length" in str(second)
    assert "rank 1 failed: RuntimeError" in capfd.readouterr().err
