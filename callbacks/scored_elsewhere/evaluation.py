"""An evaluation that is scored elsewhere: what it belongs to, and what came of it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any


@dataclass(frozen=True)
class Tag:
    """The weights that were evaluated: after how many optimizer steps, and in which epoch."""

    step: int
    epoch: int
    number: int = 0
    """Of the evaluation, where the same weights may be evaluated twice."""

    def __str__(self) -> str:
        return f"step {self.step:,} (epoch {self.epoch})"


@dataclass(frozen=True)
class Scored:
    """An evaluation's scores. Moments are `time.perf_counter()`'s."""

    tag: Tag
    scores: dict[str, float]
    seconds: float
    """Of the score function alone."""
    submitted_at: float
    arrived_at: float
    faults: tuple[str, ...] = field(default=())
    """What went wrong before it was done."""


@dataclass(frozen=True)
class NotScored:
    """An evaluation without scores: every attempt failed."""

    tag: Tag
    faults: tuple[str, ...]
    submitted_at: float
    arrived_at: float
    seconds: float = math.nan


Outcome = Scored | NotScored


def why_malformed(result: Any, names: frozenset[str] | None) -> str | None:
    """Return what is wrong with a score function's result, as the rest of a sentence, or None.

    Args:
        names: those of the scores before, which every later result must have too.
    """
    if not isinstance(result, Mapping) or not result:
        return f"gave {_short(result)}, and not a dictionary of numbers by name"
    for name, value in result.items():
        if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, Real):
            return f"gave {name!r}: {_short(value)}, and not a number by name"
    if names is not None and names != frozenset(result):
        return f"gave {', '.join(sorted(result))}, and not {', '.join(sorted(names))} as before"
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]} ..."
