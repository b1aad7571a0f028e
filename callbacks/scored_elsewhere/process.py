"""A scoring process as its parent sees it: started, given work, and ended without a trace."""

import functools
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from socket import socketpair
from typing import Any

import numpy as np

from fasttrain.callbacks.scored_elsewhere.memory import NamelessMemory
from fasttrain.errors import OptimizationError

ScoreFunction = str | Callable[..., Mapping[str, float]]
"""`score(ground_truth, rows)`, which returns numbers by name: a module's function, a `functools.partial` of one, or
where to find it: `package.module:function`, or `/path/of/file.py:function`, which imports no package around it."""

SCRIPT = Path(__file__).with_name("scoring_process.py")
LAST_WORDS = 300
"""Characters of what a process printed last that are told of its end."""


class ScoringFault(Exception):
    """What went wrong with one attempt, as the rest of a sentence about the scoring process."""


def score_reference(score: ScoreFunction) -> str | bytes:
    """Return the function in the form in which another process can find it.

    Raises:
        OptimizationError: it can't, being no function of an importable module.
    """
    if isinstance(score, str):
        if not all(score.rpartition(":")):
            raise OptimizationError(
                f"async_scoring: the score function is '{score}'; give its module or file and its name, as in "
                "'my_project.metrics:score'."
            )
        return score
    inner: Any = score
    while isinstance(inner, functools.partial):
        inner = inner.func
    try:
        pickled = pickle.dumps(score)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise OptimizationError(_not_importable(inner, str(error))) from None
    if getattr(inner, "__module__", None) in ("__main__", None):
        raise OptimizationError(_not_importable(inner, "it belongs to the script that is running"))
    return pickled


def _not_importable(function: Any, why: str) -> str:
    name = getattr(function, "__qualname__", repr(function))
    return (
        f"async_scoring: the score function {name} can't be called in another process ({why}); give a function at the "
        "top of a module that can be imported."
    )


class ScoringProcess:
    """One child process. Not for several threads at once, `end` aside.

    It sees no GPU, has a session of its own, so that Ctrl-C stays with its parent, and ends when its parent does.

    Args:
        niceness: added to the parent's, so that training's own processes go first.
        threads: of OpenMP, BLAS and Rayon.
    """

    def __init__(self, niceness: int, threads: int) -> None:
        here, there = socketpair()
        self._words = tempfile.TemporaryFile()  # noqa: SIM115
        with there:
            self._child = subprocess.Popen(
                [sys.executable, "-P", str(SCRIPT), str(there.fileno()), str(niceness)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._words,
                pass_fds=[there.fileno()],
                env={**os.environ, **_environment(threads)},
                start_new_session=True,
            )
        self._connection = Connection(here.detach())
        self._ended = False
        self.pid = self._child.pid

    def load(self, score: str | bytes, ground_truth: NamelessMemory, timeout_seconds: float) -> None:
        """Have the score function and the ground truth loaded, and wait for it.

        Raises:
            ScoringFault: it died, hung or raised.
        """
        path = [entry or os.getcwd() for entry in sys.path]
        self._send({"path": path, "score": score, "bytes": ground_truth.bytes}, ground_truth)
        self._reply("ready", timeout_seconds)

    def score(
        self, rows: NamelessMemory, shape: tuple[int, ...], dtype: np.dtype[Any], timeout_seconds: float
    ) -> tuple[Any, float]:
        """Return what the score function returned, whatever that is, and the seconds it took.

        Raises:
            ScoringFault: it died, hung or raised.
        """
        self._send({"bytes": rows.bytes, "shape": shape, "dtype": dtype, "count": math.prod(shape)}, rows)
        return self._reply("scored", timeout_seconds)

    def end(self) -> None:
        """Kill it and wait for that; it holds nothing worth keeping. May be called from any thread, and again."""
        if self._ended:  # the number may be somebody else's by now
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._ended = True
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(10)

    def close(self) -> None:
        """End it and let go of the connection."""
        self.end()
        self._connection.close()
        self._words.close()

    def _send(self, message: dict[str, Any], memory: NamelessMemory) -> None:
        try:
            self._connection.send(message)
            send_handle(self._connection, memory.descriptor, self.pid)
        except OSError:
            raise self._death() from None

    def _reply(self, kind: str, timeout_seconds: float) -> tuple[Any, float]:
        try:
            if not self._connection.poll(timeout_seconds):
                raise ScoringFault(f"hung: it had no answer after {timeout_seconds:g} s")
            told, content, seconds = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise self._death() from None
        except ScoringFault:
            raise
        except Exception as error:  # a pickle may raise anything
            raise ScoringFault(f"answered what can't be read ({type(error).__name__}: {error})") from None
        if told != kind:
            raise ScoringFault(f"raised {content}")
        return content, seconds

    def _death(self) -> ScoringFault:
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(5)
        status = self._child.returncode
        if status is not None and status < 0:
            name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
            memory = ", as the system does to a process when memory runs out" if name == "SIGKILL" else ""
            how = f"was ended by {name}{memory}"
        else:
            how = f"ended with status {status}"
        self._words.seek(0)
        words = " ".join(self._words.read().decode(errors="replace")[-LAST_WORDS:].split())
        return ScoringFault(how + (f"; its last words: {words}" if words else ""))


def _environment(threads: int) -> dict[str, str]:
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
    return {**dict.fromkeys(names, str(threads)), "CUDA_VISIBLE_DEVICES": ""}
