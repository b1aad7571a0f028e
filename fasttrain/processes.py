"""Work spread over processes that are made for it and gone after it: drawing pictures, writing files."""

import multiprocessing
import signal
import sys
import warnings
from collections.abc import Callable, Generator
from typing import TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


def in_processes(work: Callable[[Task], Result], tasks: list[Task], processes: int) -> Generator[Result, None, None]:
    """Yield work(task) in order, from forked processes where the system forks safely (Linux), else from this one."""
    if processes < 2 or not sys.platform.startswith("linux") or multiprocessing.current_process().daemon:
        yield from map(work, tasks)
        return
    with warnings.catch_warnings():
        # Python 3.12 warns of forking a process that has threads; these children take no lock of theirs.
        warnings.simplefilter("ignore", DeprecationWarning)
        pool = multiprocessing.get_context("fork").Pool(processes, signal.signal, (signal.SIGINT, signal.SIG_IGN))
    with pool:
        yield from pool.imap(work, tasks)
