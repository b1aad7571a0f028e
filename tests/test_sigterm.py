"""SIGTERM to any one of several processes: all stop before the same batch, and Lightning gets its own way back."""

import json
import os
import signal
import time
from pathlib import Path
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
from rich.console import Console

from fasttrain.callbacks import CUDAGraphStep
from fasttrain.checkpoints import LAST
from fasttrain.config import CheckpointConfig, TrainerConfig
from fasttrain.interrupt import graceful_interrupt
from fasttrain.ranks_together import RanksTogether
from fasttrain.recipe import find_recipe, resolve
from fasttrain.results import RunFolder
from fasttrain.resume import ResumePoint
from fasttrain.session import Session
from fasttrain.sigterm import BATCHES_BETWEEN_QUESTIONS
from fasttrain.trainer import make_trainer

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


def test_a_run_of_several_processes_stops_with_a_checkpoint(tmp_path: Path) -> None:
    """The run's own handler and `ResumePoint` do it; Lightning neither raises nor broadcasts."""

    def work(rank: int) -> Any:
        os.environ.update(MASTER_ADDR="127.0.0.1", LOCAL_RANK=str(rank), NODE_RANK="0")
        notes, point = Signalled(1), ResumePoint(tmp_path, CheckpointConfig(every_n_minutes=None))
        config = TrainerConfig(accelerator="cpu", devices=2, max_epochs=1, log_every_n_steps=10)
        ranks = RanksTogether(takes_sigterm=False)
        trainer = make_trainer(config, [], [notes, point], [], ranks, enable_progress_bar=False)
        assert trainer.callbacks[0] is ranks  # type: ignore[attr-defined]
        with graceful_interrupt(point.interrupt):
            trainer.fit(Small(), batches(60))
        return trainer.global_step, point.interrupted, trainer.received_sigterm

    assert run_ranks(2, work) == [(20, True, False)] * 2
    assert torch.load(tmp_path / LAST, weights_only=True)["global_step"] == 20


def test_a_run_whose_rank_is_lost_leaves_a_result(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "resnet50")
    session = Session(resolve(find_recipe("resnet50"), ["hardware=cpu"]), folder, Console(), True, 0.0)
    session._rank_lost("fasttrain: rank 1 is gone.")
    result = json.loads((folder.path / "result.json").read_text())
    assert (result["status"], result["error"]) == ("failed", "fasttrain: rank 1 is gone.")
