"""Forks the ranks of a small run, and returns what each came to."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist


class Ended(Exception):
    """A rank ended without an answer, by a signal for instance."""


def run_ranks(count: int, work: Callable[[int], Any], timeout_seconds: float = 40.0) -> list[Any]:
    """Return what `work(rank)` returned or raised on each rank; ranks that never end fail the test.

    Torch's default group is there, over gloo.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(count):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(rank, count, work, Path(folder), there))
            process.start()
            there.close()
            ends.append(here)
            processes.append(process)
        try:
            return [_answer(end, timeout_seconds) for end in ends]
        finally:
            for process in processes:
                process.join(10)
                process.kill()


def _answer(end: Connection, timeout_seconds: float) -> Any:
    assert end.poll(timeout_seconds), "a rank hangs"
    try:
        return end.recv()
    except EOFError:
        return Ended()


def _rank(rank: int, count: int, work: Callable[[int], Any], folder: Path, there: Connection) -> None:
    try:
        store = dist.FileStore(str(folder / "store"), count)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=30))
        answer = work(rank)
    except BaseException as error:
        traceback.print_exc()
        answer = error
    there.send(answer)
    there.close()
    os._exit(0)  # as a crash would: nothing is put in order
