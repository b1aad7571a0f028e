"""Runs the bench cases of rooms and recipes: `bench.py` in each holds `cases()`, and each case yields rows."""

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

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

    @property
    def options(self) -> dict[str, Any]:
        """What of the work can be asked for otherwise, and its usual value: the keyword-only parameters of `run`."""
        parameters = inspect.signature(self.run).parameters.values()
        return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}


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


def split_options(words: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Return the words that name cases, and the values of those of the form OPTION=VALUE."""
    words = list(words)
    options = dict(word.split("=", 1) for word in words if "=" in word)
    return [word for word in words if "=" not in word], options


def with_options(cases: Iterable[Case], options: Mapping[str, str]) -> list[Case]:
    """Return the cases with other values for some of their options, read as what their usual values are.

    Raises:
        ConfigError: a case has no such option, or the value is of another kind.
    """
    return [replace(case, run=partial(case.run, **_values(case, options))) for case in cases]


def _values(case: Case, options: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for name, text in options.items():
        if name not in case.options:
            known = nearest(name, list(case.options)) if case.options else "it has none"
            raise ConfigError(f"bench case {case.subject}/{case.name} has no option '{name}'; {known}")
        kind = type(case.options[name])
        try:
            values[name] = kind(text)
        except ValueError:
            usual = case.options[name]
            raise ConfigError(
                f"bench option {name}={text} is no {kind.__name__}; the usual value is {usual}."
            ) from None
    return values


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
