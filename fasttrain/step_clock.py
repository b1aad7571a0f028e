"""What each single step of a fit waited for, on the device's own time where it is a GPU."""

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from fasttrain.clock import RunClock
from fasttrain.measure import synchronize


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, from the begin of its batch's fetching to that of the next."""

    whole: float
    data_wait: float
    """Of it, until the batch was there."""
    host_to_device: float
    """Of it, until the batch was on the device."""


@dataclass
class _Marks:
    fetch: Any
    fetched: Any = None
    move: Any = None
    moved: Any = None


class StepClock(RunClock):
    """A RunClock that keeps each step's times.

    The host runs ahead of a GPU: while it waits for a loader the GPU may have work, and then nothing is lost. So on a
    GPU the marks are events between the steps' kernels: what passes between two of them is time without a step.
    """

    def __init__(self, device: torch.device | str) -> None:
        super().__init__()
        self.device = torch.device(device)
        self._marks: list[_Marks] = []

    @property
    def begun(self) -> int:
        """Steps whose batch was asked for."""
        return len(self._marks)

    def start(self, action_name: str) -> None:
        """Mark the begin of an action."""
        super().start(action_name)
        part = self._part(action_name)
        if part == "data_wait":
            self._marks.append(_Marks(self._now()))
        elif part == "host_to_device" and self._marks:
            self._marks[-1].move = self._now()

    def stop(self, action_name: str) -> None:
        """Mark its end."""
        super().stop(action_name)
        part = self._part(action_name)
        if part == "data_wait" and self._marks:
            self._marks[-1].fetched = self._now()
        elif part == "host_to_device" and self._marks:
            self._marks[-1].moved = self._now()

    def steps(self, first: int, end: int) -> list[StepTime]:
        """Return the times of the steps from `first` up to and without `end`, as far as the next has begun."""
        synchronize(self.device)
        marks = self._marks[first : end + 1]
        return [
            StepTime(
                self._seconds(one.fetch, other.fetch),
                self._seconds(one.fetch, one.fetched),
                self._seconds(one.move, one.moved),
            )
            for one, other in pairwise(marks)
        ]

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _seconds(self, begin: Any, end: Any) -> float:
        if begin is None or end is None:
            return 0.0
        return float(begin.elapsed_time(end)) / 1e3 if self.device.type == "cuda" else float(end - begin)
