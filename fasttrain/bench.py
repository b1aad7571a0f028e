"""Runs the bench cases of rooms and recipes: `bench.py` in each holds `cases()`, and each case yields rows."""

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from fasttrain.errors import ConfigError, nearest
from fasttrain.measure import Row


@dataclass(frozen=True)
class Case:
    """One comparison: all its variants are measured in one run on one machine."""

    subject: str
    name: str
    summary: str
    run: Callable[[], Iterable[Row]]
    needs_gpu: bool = False


def find_cases(modules: Iterable[str]) -> list[Case]:
    """Return the cases of those packages that have a `bench` module."""
    cases: list[Case] = []
    for package in modules:
        name = f"{package}.bench"
        # A recipe may be a YAML file alone, without a package beside it.
        if importlib.util.find_spec(package) is not None and importlib.util.find_spec(name) is not None:
            cases.extend(importlib.import_module(name).cases())
    return cases


def choose_cases(cases: Iterable[Case], wanted: Iterable[str]) -> list[Case]:
    """Return the cases of the wanted subjects, or `subject/case`s; all of them when none is named.

    Raises:
        ConfigError: a name that no case has.
    """
    cases, wanted = list(cases), list(wanted)
    if not wanted:
        return cases
    chosen = []
    for name in wanted:
        found = [case for case in cases if name in (case.subject, f"{case.subject}/{case.name}")]
        if not found:
            known = sorted({case.subject for case in cases} | {f"{case.subject}/{case.name}" for case in cases})
            raise ConfigError(f"there is no bench case '{name}'; {nearest(name, known)}")
        chosen += [case for case in found if case not in chosen]
    return chosen


def run_cases(cases: Iterable[Case], on_gpu: bool) -> Iterator[tuple[Case, Row | None]]:
    """Run the cases one after another, and yield each row when it is measured.

    None instead of rows for a case that needs a GPU where there is none.
    """
    for case in cases:
        if case.needs_gpu and not on_gpu:
            yield case, None
            continue
        for row in case.run():
            yield case, row
