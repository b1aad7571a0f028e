"""The scoring process: a script, run by its path, that imports Python's own modules, NumPy and what its score needs.

    python -P scoring_process.py FILE_DESCRIPTOR NICENESS

Imported by its name it would bring the whole package, and torch with it, which takes seconds. Over the connection come
first the import paths, the score function and the ground truth, then one evaluation after another; back goes what came
of each. When the other end is gone, however it went, this process ends.
"""

import importlib
import importlib.util
import mmap
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any, cast

LONGEST = 400
"""Characters of an error that are told."""


def main(connection: Connection, niceness: int) -> None:
    """Score what comes, until nobody is there to send."""
    arrived: queue.Queue[tuple[Any, int]] = queue.Queue()
    threading.Thread(target=_receive, args=(connection, arrived), daemon=True).start()
    os.nice(niceness)
    score: Callable[..., Any] | None = None
    truth: Any = None
    while True:
        message, descriptor = arrived.get()
        reply: tuple[str, Any, float]
        try:
            if score is None:
                sys.path[:] = message["path"]
                score, truth = _function(message["score"]), pickle.loads(_mapped(descriptor, message["bytes"]))
                reply = ("ready", os.getpid(), 0.0)
            else:
                reply = _scored(score, truth, message, descriptor)
        except Exception as error:  # whatever a user's function may raise, and MemoryError
            reply = ("raised", _text(error), 0.0)
        finally:
            os.close(descriptor)
        connection.send_bytes(pickle.dumps(reply))


def _receive(connection: Connection, arrived: "queue.Queue[tuple[Any, int]]") -> None:
    """Take messages in a thread of its own, so that the other end's death is noticed in the middle of a scoring."""
    try:
        while True:
            arrived.put((connection.recv(), recv_handle(connection)))
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)  # with what a score function has started; the session is this process's own


def _scored(score: Callable[..., Any], truth: Any, message: Any, descriptor: int) -> tuple[str, Any, float]:
    import numpy as np

    memory = _mapped(descriptor, message["bytes"])
    rows = np.frombuffer(memory, dtype=message["dtype"], count=message["count"]).reshape(message["shape"])
    begun = time.perf_counter()
    result = score(truth, rows)
    # A dictionary of a class of the score's own would need that class on the other side.
    result = dict(result) if isinstance(result, dict) else result
    pickle.dumps(result)
    return "scored", result, time.perf_counter() - begun


def _mapped(descriptor: int, size: int) -> Any:
    """Return memory to read from. It may be written to; the other side's stays what it is, for a second attempt."""
    return mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY) if size else bytearray()


def _function(reference: Any) -> Callable[..., Any]:
    """Return the function that `module:name` or `file.py:name` stands for, or that was pickled by its name."""
    if isinstance(reference, bytes):
        return cast(Callable[..., Any], pickle.loads(reference))
    where, _, name = str(reference).rpartition(":")
    if not where.endswith(".py"):
        return cast(Callable[..., Any], getattr(importlib.import_module(where), name))
    spec = importlib.util.spec_from_file_location("fasttrain_score", where)
    if spec is None or spec.loader is None:
        raise ImportError(f"{where} can't be loaded as a module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return cast(Callable[..., Any], getattr(module, name))


def _text(error: BaseException) -> str:
    text = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return (text if len(text) <= LONGEST else f"{text[:LONGEST]} ...") + where


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), int(sys.argv[2]))
