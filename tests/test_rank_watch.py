"""Ranks that watch each other: whoever is left is told at once who is missing, and ends by itself."""

import os
import signal
import socket
import threading
import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from graph_fits import Small, batches
from lightning.pytorch.strategies import DDPStrategy
from rank_processes import Ended, run_ranks

from fasttrain.rank_watch import RankWatch
from fasttrain.ranks_together import RanksTogether

pytestmark = pytest.mark.skipif(torch.cuda.is_initialized(), reason="a process that uses CUDA can't be forked")


def share(value: Any) -> Any:
    values = [value]
    dist.broadcast_object_list(values, 0)
    return values[0]


def watched(rank: int, ranks: int = 3) -> tuple[RankWatch, threading.Event, list[str]]:
    heard, told = threading.Event(), list[str]()

    def lost(clause: str) -> None:
        told.append(clause)
        heard.set()

    return RankWatch(rank, ranks, share, "127.0.0.1", lost), heard, told


@pytest.mark.parametrize("dead", [0, 1])
def test_a_killed_rank_is_named_to_all_others(dead: int) -> None:
    def work(rank: int) -> Any:
        _, heard, told = watched(rank)
        dist.barrier()
        if rank == dead:
            if dead and os.fork() == 0:  # a loader's worker, say, holds what its parent held
                time.sleep(6)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        assert heard.wait(10)
        return told, time.monotonic() - begin

    for rank, answer in enumerate(run_ranks(3, work)):
        if rank == dead:
            assert isinstance(answer, Ended)
        else:
            assert answer[0] == [f"rank {dead} is gone: it was killed, or its host is cut off"]
            assert answer[1] < 5


@pytest.mark.parametrize("failing", [0, 2])
def test_a_rank_that_fails_says_why(failing: int) -> None:
    def work(rank: int) -> Any:
        watch, heard, told = watched(rank)
        if rank == failing:
            watch.tell_failure("ValueError: two\nlines")
            return told
        assert heard.wait(10)
        watch.tell_failure("RuntimeError: connection closed by peer")  # follows from the other's, and is not told
        time.sleep(0.5)
        return told

    expected: list[Any] = [[f"rank {failing} failed: ValueError: two lines"]] * 3
    expected[failing] = []
    assert run_ranks(3, work) == expected


def test_ranks_that_end_in_good_order_tell_nobody() -> None:
    def work(rank: int) -> Any:
        watch, heard, told = watched(rank)
        dist.barrier()
        if rank == 1:
            time.sleep(0.5)
        watch.close()
        watch.close()
        return heard.wait(1.0) or told

    assert run_ranks(3, work) == [[], [], []]


def test_strangers_are_turned_away() -> None:
    def work(rank: int) -> Any:
        def shared(value: Any) -> Any:
            host, port, token = share(value)
            if rank == 1:
                for hello in (b"what\n", b"0 1\n", b"\xff\n", b""):
                    with socket.create_connection(("127.0.0.1", port)) as stranger:
                        stranger.sendall(hello)
            return host, port, token

        watch = RankWatch(rank, 2, shared, "127.0.0.1", lambda clause: None)
        watch.close()
        return "connected"

    assert run_ranks(2, work) == ["connected", "connected"]


class Fails(pl.Callback):
    """The second rank ends in the middle; the first waits without end, as for a device that waits for the other's."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3 and trainer.global_rank == 1:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("planted")
        while batch_idx == 3:
            time.sleep(1)


@pytest.mark.parametrize(
    ("how", "clause"),
    [
        ("killed", "rank 1 is gone: it was killed, or its host is cut off"),
        ("raised", "rank 1 failed: ValueError: planted"),
    ],
)
def test_a_rank_that_waits_is_ended_with_a_sentence(how: str, clause: str, capfd: pytest.CaptureFixture[str]) -> None:
    callbacks = [RanksTogether(grace_seconds=1.0), Fails(how), RanksTogether()]

    def work(rank: int) -> Any:
        os.environ.update(MASTER_ADDR="127.0.0.1", LOCAL_RANK=str(rank), NODE_RANK="0")
        trainer = pl.Trainer(
            accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="gloo"), callbacks=callbacks,
            logger=False, max_epochs=1, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Small(), batches(10))

    first, second = run_ranks(2, work)
    assert isinstance(first, Ended)
    assert isinstance(second, Ended if how == "killed" else ValueError)
    expected = f"fasttrain: {clause}. Rank 0 ends, too; training can go on from the last checkpoint."
    assert capfd.readouterr().err.count(expected) == 1


def test_a_fit_that_ends_well_tells_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    def work(rank: int) -> Any:
        os.environ.update(MASTER_ADDR="127.0.0.1", LOCAL_RANK=str(rank), NODE_RANK="0")
        trainer = pl.Trainer(
            accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="gloo"),
            callbacks=[RanksTogether(grace_seconds=0.1)], logger=False, max_epochs=1, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Small(), batches(4))
        time.sleep(1.5 * rank)
        return trainer.global_step

    assert run_ranks(2, work) == [4, 4]
    assert "fasttrain:" not in capfd.readouterr().err
