"""SIGTERM to any one of several processes: all stop before the same batch, and Lightning gets its own way back."""

import os
import signal
import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from graph_fits import Small, batches
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rank_processes import run_ranks

from fasttrain.callbacks import CUDAGraphStep
from fasttrain.ranks_together import RanksTogether
from fasttrain.sigterm import BATCHES_BETWEEN_QUESTIONS

pytestmark = pytest.mark.skipif(torch.cuda.is_initialized(), reason="a process that uses CUDA can't be forked")


class Signalled(pl.Callback):
    """One rank gets the signal in the middle of a step; notes every batch, and what is broadcast."""

    def __init__(self, rank: int | None) -> None:
        self.rank, self.seen, self.broadcasts = rank, list[int](), 0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch_idx)
        if batch_idx == 13 and trainer.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)


def fit(rank: int, signalled: int | None, callbacks: list[pl.Callback], count: int = 60) -> Any:
    os.environ.update(MASTER_ADDR="127.0.0.1", LOCAL_RANK=str(rank), NODE_RANK="0")
    notes = Signalled(signalled)
    plain = dist.broadcast

    def counted(*arguments: Any, **options: Any) -> Any:
        notes.broadcasts += 1
        return plain(*arguments, **options)

    dist.broadcast = counted
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="gloo"),
        callbacks=[*callbacks, notes], logger=False, max_epochs=1, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    ended = "finished"
    try:
        trainer.fit(Small(), batches(count))
    except SIGTERMException:
        ended = "told to end" if trainer.received_sigterm else "?"
    of_lightning = (
        type(trainer.fit_loop.epoch_loop)._broadcast_sigterm_tensor is _TrainingEpochLoop._broadcast_sigterm_tensor
        and "_broadcast_sigterm_tensor" not in vars(trainer.fit_loop.epoch_loop)
        and "_sigterm_notifier_fn" not in vars(trainer._signal_connector)
    )
    return ended, notes.seen, notes.broadcasts, of_lightning, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("signalled", [0, 1])
@pytest.mark.parametrize("graph", [False, True])
def test_all_ranks_stop_before_the_same_batch(signalled: int, graph: bool) -> None:
    def work(rank: int) -> Any:
        return fit(rank, signalled, [CUDAGraphStep(stand_in=True) if graph else RanksTogether()])

    begin = time.monotonic()
    first, second = run_ranks(2, work)
    assert first == second
    ended, seen, broadcasts, of_lightning, is_default = first
    assert ended == "told to end"
    assert seen == list(range(len(seen)))
    assert 14 <= len(seen) <= 14 + 2 * BATCHES_BETWEEN_QUESTIONS
    assert broadcasts == 0
    assert of_lightning
    assert is_default
    assert time.monotonic() - begin < 20


def test_without_a_signal_nobody_stops() -> None:
    first, second = run_ranks(2, lambda rank: fit(rank, None, [RanksTogether()], count=25))
    assert first == second == ("finished", list(range(25)), 0, True, True)
