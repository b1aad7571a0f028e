"""`AsyncScorer`: scores evaluations in a process of its own, one after another, while its caller goes on."""

import atexit
import os
import pickle
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fasttrain.callbacks.scored_elsewhere.evaluation import NotScored, Outcome, Scored, Tag, why_malformed
from fasttrain.callbacks.scored_elsewhere.memory import NamelessMemory, joint_shape, memory_of
from fasttrain.callbacks.scored_elsewhere.process import ScoreFunction, ScoringFault, ScoringProcess, score_reference
from fasttrain.environment import usable_cores
from fasttrain.errors import OptimizationError

LOOK_SECONDS = 0.002
"""Between two looks whether rows have come, in the thread."""


class ComingRows(Protocol):
    """Arrays that are on their way, as a `concurrent.futures.Future` of them is."""

    def done(self) -> bool:
        """Whether they are there."""
        ...

    def result(self) -> Sequence[NDArray[Any]]:
        """Wait for them; raises what went wrong. Called from several threads."""
        ...


Rows = NDArray[Any] | Sequence[NDArray[Any]] | ComingRows


class AsyncScorer:
    """Scores detections, or whatever a metric takes, in one other process that is kept.

        scorer = AsyncScorer("my_project.metrics:score", ground_truth)
        scorer.submit(rows, Tag(step=1000, epoch=3))     # returns at once
        for outcome in scorer.poll(): ...                # those that are done, in the order of `submit`
        scorer.drain(); scorer.close()

    The process starts at once. Whatever goes wrong in it is told by `tell`, and tried once more in a new process with
    the rows that are kept for that; then the outcome is `NotScored`.

    Args:
        score: called in the process as `score(ground_truth, rows)`; returns numbers by name.
        ground_truth: pickled once.
        most_in_flight: evaluations that may be waiting or scored at a time; `submit` waits for room, and says so once.
        timeout_seconds: after which a scoring, or the loading before it, counts as hung.
        niceness: how far the process stands back behind others.
        threads: that it may use; None is half of the usable cores.
        attempts: to score an evaluation, each in a new process.
        tell: called from another thread with a sentence about a fault.

    Raises:
        OptimizationError: another process could not find the function.
    """

    def __init__(
        self,
        score: ScoreFunction,
        ground_truth: Any,
        *,
        most_in_flight: int = 2,
        timeout_seconds: float = 1800.0,
        niceness: int = 10,
        threads: int | None = None,
        attempts: int = 2,
        tell: Callable[[str], None] = warnings.warn,
    ) -> None:
        self.most_in_flight, self.timeout_seconds, self.tell = max(1, most_in_flight), timeout_seconds, tell
        self.attempts = attempts
        self.waited_seconds = 0.0
        """Spent in `submit`, waiting for room."""
        self._settings = (niceness, threads or max(1, usable_cores() // 2))
        self._score = score_reference(score)
        self._truth = NamelessMemory()
        self._truth.append(pickle.dumps(ground_truth, protocol=pickle.HIGHEST_PROTOCOL))
        self._names: frozenset[str] | None = None
        self._changed = threading.Condition()
        self._kept: deque[_Job] = deque()  # until their outcome was handed out
        self._spent: deque[_Job] = deque()  # whose memory the thread will give back, which takes a while
        self._process: ScoringProcess | None = None
        self._broken: BaseException | None = None
        self._closed = self._told_to_wait = False
        atexit.register(self.close)
        self._thread = threading.Thread(target=self._work, name="fasttrain-scoring", daemon=True)
        self._thread.start()

    @property
    def in_flight(self) -> int:
        """Evaluations that have no outcome yet."""
        return sum(job.outcome is None for job in self._kept)

    @property
    def pid(self) -> int | None:
        """The scoring process, where there is one at this moment."""
        process = self._process
        return process.pid if process is not None else None

    @property
    def outstanding(self) -> int:
        """Evaluations whose outcome was not handed out yet."""
        return len(self._kept)

    @property
    def arrived(self) -> int:
        """Outcomes that the next `poll` would return; 1 where it would raise."""
        count = 0
        if self._broken is not None:
            return 1
        for job in self._kept:
            if job.outcome is None:
                break
            count += 1
        return count

    def submit(self, rows: Rows, tag: Tag) -> None:
        """Hand over rows to be scored, an array or several to be joined along the first dimension.

        They are copied in another thread: don't change them afterwards. Waits where too many are in flight, rows that
        are still to come (`ComingRows`) included.

        Raises:
            ValueError: arrays that can't be joined.
            OptimizationError: the scorer was closed.
        """
        job = _Job(tag, [rows] if isinstance(rows, np.ndarray) else rows)
        self.wait_for_room(tag)
        with self._changed:
            self._kept.append(job)
            self._changed.notify_all()

    def wait_for_room(self, tag: Tag, seconds: float | None = None) -> bool:
        """Wait until fewer than `most_in_flight` are in flight, or some seconds; return whether there is room.

        Args:
            tag: of the evaluation that wants it, to be told of.
            seconds: None is as long as it takes.
        """
        with self._changed:
            self._check()
            if self.in_flight < self.most_in_flight:
                return True
            if not self._told_to_wait:
                self._told_to_wait = True
                self.tell(
                    f"{tag} is evaluated and {self.in_flight} evaluations before it are not scored yet: training waits "
                    "for room. Evaluate less often, or allow more by most_in_flight; this is said once."
                )
            begun = time.perf_counter()
            self._changed.wait_for(lambda: self.in_flight < self.most_in_flight or self._stopped, seconds)
            self.waited_seconds += time.perf_counter() - begun
            self._check()
            return self.in_flight < self.most_in_flight

    def poll(self, most: int | None = None) -> list[Outcome]:
        """Return the outcomes that have arrived since the last call, in the order of `submit`. Never waits.

        Args:
            most: return no more than these; None for all.
        """
        if not self._kept or self._kept[0].outcome is None:
            if self._broken is not None:
                self._check()
            return []
        outcomes: list[Outcome] = []
        with self._changed:
            while len(outcomes) != most and self._kept and (outcome := self._kept[0].outcome) is not None:
                outcomes.append(outcome)
                self._spent.append(self._kept.popleft())
            self._changed.notify_all()
        return outcomes

    def wait(self, seconds: float) -> None:
        """Wait until `poll` has something to return or nothing is in flight, at most some seconds."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._kept or self._kept[0].outcome is not None or self._stopped, seconds
            )  # fmt: skip
            self._check()

    def drain(
        self, progress: Callable[[int, int, float], None] = lambda done, total, seconds: None, every: float = 10.0
    ) -> list[Outcome]:
        """Wait for every outcome and return those not handed out yet.

        `progress(done, total, seconds)` is called at the begin, then at each arrival and every few seconds.
        """
        begun, total = time.perf_counter(), len(self._kept)
        outcomes: list[Outcome] = []
        while True:
            outcomes += self.poll()
            progress(len(outcomes), total, time.perf_counter() - begun)
            if not self._kept:
                return outcomes
            self.wait(every)

    def unfinished(self) -> list[tuple[Tag, NDArray[Any]]]:
        """Return copies of the rows whose outcome was not handed out yet."""
        with self._changed:
            return [(job.tag, job.array()) for job in self._kept]

    def close(self) -> None:
        """End the process, whatever it is doing, and let go of everything. May be called again."""
        with self._changed:
            self._closed = True
            process = self._process
            self._changed.notify_all()
        if process is not None:
            process.end()
        if self._thread is not threading.current_thread():
            self._thread.join(20)
        with self._changed:
            for job in (*self._kept, *self._spent):
                job.release()
            self._kept.clear()
            self._spent.clear()
        self._truth.close()
        atexit.unregister(self.close)

    def __enter__(self) -> "AsyncScorer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def _stopped(self) -> bool:
        return self._closed or self._broken is not None

    def _check(self) -> None:
        if self._closed:
            raise OptimizationError("async_scoring: this scorer was closed; make another one.")
        if self._broken is not None:
            raise RuntimeError(f"the thread that scores has failed: {self._broken!r}") from self._broken

    # ---- in the thread ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._start_early()
            while True:
                job = self._next()
                outcome = self._outcome(job)
                with self._changed:
                    job.outcome = outcome
                    self._changed.notify_all()
        except _ClosedMeanwhile:
            pass
        except BaseException as error:  # nobody else would hear of it
            with self._changed:
                self._broken = error
                self._changed.notify_all()
        finally:
            self._drop_process()

    def _next(self) -> "_Job":
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._spent or self.in_flight > 0)
                if self._closed:
                    raise _ClosedMeanwhile
                if not self._spent:
                    return next(job for job in self._kept if job.outcome is None)
                spent = self._spent.popleft()
            spent.release()

    def _outcome(self, job: "_Job") -> Outcome:
        faults: list[str] = []
        while len(faults) < self.attempts:
            try:
                scores, seconds = self._attempt(job)
                return Scored(job.tag, scores, seconds, job.submitted_at, time.perf_counter(), tuple(faults))
            except ScoringFault as fault:
                self._drop_process()
                if self._closed:
                    raise _ClosedMeanwhile from None
                faults.append(f"the scoring process {fault}")
                last = len(faults) == self.attempts
                then = "it stays without a score" if last else "trying once more in a new process"
                self.tell(f"scoring {job.tag}: {faults[-1]}; {then}.")
        return NotScored(job.tag, tuple(faults), job.submitted_at, time.perf_counter())

    def _attempt(self, job: "_Job") -> tuple[dict[str, float], float]:
        while not job.has_come():
            if self._closed:
                raise _ClosedMeanwhile
            time.sleep(LOOK_SECONDS)
        try:
            memory = job.memory
            if memory is None:
                memory = memory_of(job.parts)
                with self._changed:
                    job.memory, job.rows = memory, []
        except OSError as error:
            raise ScoringFault(f"was not given the rows: {os.strerror(error.errno or 0)}") from None
        except (ValueError, RuntimeError) as error:
            raise ScoringFault(f"was not given the rows: {error}") from None
        process = self._process or self._start()
        result, seconds = process.score(memory, job.shape, job.dtype, self.timeout_seconds)
        if reason := why_malformed(result, self._names):
            raise ScoringFault(reason)
        self._names = frozenset(result)
        return {name: float(value) for name, value in result.items()}, seconds

    def _start(self) -> ScoringProcess:
        with self._changed:  # so that `close` finds every process that was started
            if self._closed:
                raise _ClosedMeanwhile
            process = self._process = ScoringProcess(*self._settings)
        try:
            process.load(self._score, self._truth, self.timeout_seconds)
        except ScoringFault:
            self._drop_process()
            raise
        return process

    def _start_early(self) -> None:
        try:
            self._start()
        except ScoringFault as fault:
            if self._closed:
                raise _ClosedMeanwhile from None
            self.tell(f"the scoring process {fault}; another one will be started for the first evaluation.")

    def _drop_process(self) -> None:
        with self._changed:
            process, self._process = self._process, None
        if process is not None:
            process.close()


class _ClosedMeanwhile(Exception):
    """The scorer was closed while its thread was at work."""


class _Job:
    """Rows of one evaluation, as arrays and then in memory that the process can map, and what came of them."""

    def __init__(self, tag: Tag, rows: Sequence[NDArray[Any]] | ComingRows) -> None:
        self.tag = tag
        self.rows = list(rows) if isinstance(rows, Sequence) else rows
        self.shape: tuple[int, ...] = (0,)
        self.dtype: np.dtype[Any] = np.dtype("<f8")
        self.memory: NamelessMemory | None = None
        self.outcome: Outcome | None = None
        self.submitted_at = time.perf_counter()
        if isinstance(self.rows, list):
            self._describe(self.rows)

    @property
    def parts(self) -> Sequence[NDArray[Any]]:
        """The arrays; waits for those that are on their way."""
        if isinstance(self.rows, list):
            return self.rows
        parts = self.rows.result()
        self._describe(parts)
        return parts

    def has_come(self) -> bool:
        """Whether `parts` would not wait."""
        return isinstance(self.rows, list) or self.rows.done()

    def array(self) -> NDArray[Any]:
        """Return a copy of the rows."""
        if self.memory is None:
            parts = self.parts
            return np.concatenate(parts) if parts else np.zeros(self.shape)
        return np.frombuffer(bytearray(self.memory.read()), dtype=self.dtype).reshape(self.shape)

    def release(self) -> None:
        """Let go of the rows."""
        self.rows = []
        if self.memory is not None:
            self.memory.close()

    def _describe(self, parts: Sequence[NDArray[Any]]) -> None:
        self.shape = joint_shape(parts)
        self.dtype = parts[0].dtype if parts else self.dtype
