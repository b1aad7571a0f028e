"""Read a run folder back as values; what is missing or damaged becomes a sentence, not an exception.

Neither torch nor Lightning is imported: a report opens at once.
"""

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from fasttrain.errors import ConfigError

RUN_FILES = {
    "config.yaml": "its settings are unknown, and it can't be grouped with runs that differ by seed",
    "environment.json": "the machine and the versions are unknown",
    "plan.json": "which optimizations were on is unknown",
    "metrics.csv": "there are no curves to draw",
    "result.json": "the run crashed or is still going, and its totals are read off metrics.csv as far as that goes",
}
"""The files of a run folder, and what a report can't say without each."""

OPTIONAL_FILES = {"optimizations.json": "what the optimizations told of the run is unknown"}
"""Files that a run leaves only if there is something in them, and what a report can't say where one is damaged."""

UNKNOWN = "—"

NOT_REACHED = ("finished", "interrupted", "failed")
"""Statuses of a run that ended short of its target, if it had one."""


@dataclass(frozen=True)
class Quality:
    """The score a run is judged by: its last and its best value."""

    name: str
    value: float | None
    best: float | None


@dataclass(frozen=True)
class Target:
    """The score at which the run has done its work; `mode` is max or min, the better direction."""

    name: str
    value: float
    mode: str


@dataclass(frozen=True)
class Reached:
    """Where the target was reached; `seconds` of wall time since fit began."""

    seconds: float
    step: int | None
    epoch: int | None
    samples: int | None


@dataclass(frozen=True)
class PlannedOptimization:
    """One line of the plan; `verdict` is applies, refused or off, and `changes` are sentences."""

    name: str
    verdict: str
    reason: str
    stage: str
    grade: str
    changes: tuple[str, ...]


Cell = str | float | None
"""A text, or a number that may be unknown."""


@dataclass(frozen=True)
class OutcomeTable:
    """What one optimization told at the run's end; each row has one cell for each column."""

    optimization: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str


@dataclass(frozen=True)
class Curve:
    """One logged number over the run, by rising step; of a step that was run again after a resume, the last."""

    steps: tuple[int, ...]
    seconds: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class RunSummary:
    """One run as its folder tells it: None where the folder doesn't say, with the reason among `problems`."""

    path: Path
    recipe: str
    status: str
    error: str | None
    seed: int | None
    quality: Quality | None
    target: Target | None
    reached: Reached | None
    samples: int | None
    steps: int | None
    epochs: int | None
    seconds: float | None
    samples_per_second: float | None
    breakdown_seconds: Mapping[str, float]
    bad_samples: Mapping[str, Any]
    environment: Mapping[str, Any]
    optimizations: tuple[PlannedOptimization, ...] | None
    outcome_tables: tuple[OutcomeTable, ...]
    config: Mapping[str, Any]
    config_text: str
    curves: Mapping[str, Curve]
    pictures: tuple[Path, ...]
    problems: tuple[str, ...]


def load_run(path: Path) -> RunSummary:
    """Read one run folder.

    Raises:
        ConfigError: `path` is no run folder.
    """
    _require_run_folder(path)
    problems: list[str] = []
    result = _read_mapping(path / "result.json", problems)
    plan = _read_mapping(path / "plan.json", problems)
    outcome_tables = _outcome_tables(_read_mapping(path / "optimizations.json", problems), problems)
    environment = _read_mapping(path / "environment.json", problems)
    config = _read_mapping(path / "config.yaml", problems)
    curves = _read_metrics(path / "metrics.csv", problems)
    target = _target(result.get("target")) or _target(config.get("target"))
    rates = curves.get("samples_per_second")
    return RunSummary(
        path=path,
        recipe=text_of(result.get("recipe")) or text_of(config.get("recipe")) or "unknown recipe",
        status=text_of(result.get("status")) or "unknown",
        error=text_of(result.get("error")) or None,
        seed=_first_integer(result.get("seed"), config.get("seed")),
        quality=_quality(result.get("quality")) or _quality_from_curve(target, curves),
        target=target,
        reached=_reached(result.get("reached_at")) if result.get("reached") is not False else None,
        samples=_first_integer(result.get("samples")),
        steps=_first_integer(result.get("steps"), max((c.steps[-1] for c in curves.values()), default=None)),
        epochs=_first_integer(result.get("epochs")),
        seconds=first_number(result.get("seconds"), max((max(c.seconds) for c in curves.values()), default=None)),
        samples_per_second=first_number(result.get("samples_per_second"), fmean(rates.values) if rates else None),
        breakdown_seconds=_numbers(result.get("breakdown_seconds")),
        bad_samples=_mapping(result.get("bad_samples")),
        environment=environment,
        optimizations=tuple(map(_optimization, _list(plan["optimizations"]))) if "optimizations" in plan else None,
        outcome_tables=outcome_tables,
        config=config,
        config_text=_read_text(path / "config.yaml"),
        curves=curves,
        # The sheet shows the other pictures once more.
        pictures=tuple(sorted(p for p in (path / "samples").glob("*.png") if p.stem != "contact-sheet")),
        problems=tuple(problems),
    )


def is_run_folder(path: Path) -> bool:
    """Whether a folder holds any file of a run."""
    return any((path / name).is_file() for name in RUN_FILES)


def _require_run_folder(path: Path) -> None:
    holds = ", ".join(RUN_FILES)
    if not path.exists():
        raise ConfigError(f"'{path}' does not exist; a run folder is written by `fasttrain fit` and holds {holds}.")
    if not path.is_dir():
        raise ConfigError(f"'{path}' is a file, not a run folder; give the folder that holds {holds}.")
    if not is_run_folder(path):
        configs = (*path.glob("*/config.yaml"), *path.glob("*/*/config.yaml"))
        inside = sorted(config.parent.relative_to(path).as_posix() for config in configs)
        hint = f" Run folders inside it: {', '.join(inside[-3:])}." if inside else ""
        raise ConfigError(f"'{path}' is no run folder: it holds none of {holds}.{hint}")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_mapping(path: Path, problems: list[str]) -> dict[str, Any]:
    loss = (RUN_FILES | OPTIONAL_FILES)[path.name]
    if not path.is_file():
        if path.name in RUN_FILES:
            problems.append(f"{path.name} is missing: {loss}.")
        return {}
    text = _read_text(path)
    try:
        value = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        line = getattr(error, "lineno", None) or getattr(getattr(error, "problem_mark", None), "line", -1) + 1
        problems.append(f"{path.name} is cut short or damaged (at line {line}): {loss}.")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name} holds no keys and values: {loss}.")
    return _mapping(value)


def _read_metrics(path: Path, problems: list[str]) -> dict[str, Curve]:
    if not path.is_file():
        problems.append(f"metrics.csv is missing: {RUN_FILES['metrics.csv']}.")
        return {}
    text = _read_text(path)
    # A last line without its newline may have lost digits, and 0.4 for 0.41 would pass for a value.
    whole, _, rest = text.rpartition("\n")
    points: dict[str, dict[int, tuple[float, float]]] = {}
    unreadable = 1 if rest else 0
    for row in csv.DictReader(io.StringIO(whole)):
        try:
            # int() refuses a step of NaN, which would break the order of the points.
            step, seconds, value = int(row["step"]), float(row["seconds"]), float(row["value"])
            points.setdefault(row["name"], {})[step] = (seconds, value)
        except (KeyError, TypeError, ValueError):
            unreadable += 1
    if unreadable:
        problems.append(f"metrics.csv: lines that are cut short or damaged and left out: {unreadable}.")
    if not points:
        problems.append(f"metrics.csv holds no values: {RUN_FILES['metrics.csv']}.")
    curves = {name: _curve(by_step) for name, by_step in sorted(points.items())}
    problems.extend(f"{name} is not a finite number from step {s} on." for name, s in _diverged(curves))
    return curves


def _curve(by_step: Mapping[int, tuple[float, float]]) -> Curve:
    steps = sorted(by_step)
    return Curve(tuple(steps), tuple(by_step[s][0] for s in steps), tuple(by_step[s][1] for s in steps))


def _diverged(curves: Mapping[str, Curve]) -> Iterator[tuple[str, int]]:
    """Yield (name, first bad step) of the curves that end in NaN or infinity."""
    for name, curve in curves.items():
        last_good = max((i for i, value in enumerate(curve.values) if math.isfinite(value)), default=-1)
        if last_good + 1 < len(curve.values):
            yield name, curve.steps[last_good + 1]


def _mapping(value: Any) -> dict[str, Any]:
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def text_of(value: Any) -> str:
    """Return a text as it is, and nothing for anything else."""
    return value if isinstance(value, str) else ""


def first_number(*values: Any) -> float | None:
    """Return the first of the values that is a finite number."""
    for value in values:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            continue
        if math.isfinite(number):
            return number
    return None


def _first_integer(*values: Any) -> int | None:
    number = first_number(*values)
    return None if number is None else int(number)


def _numbers(value: Any) -> dict[str, float]:
    return {key: number for key, item in _mapping(value).items() if (number := first_number(item)) is not None}


def _quality(value: Any) -> Quality | None:
    found = _mapping(value)
    name = text_of(found.get("name"))
    return Quality(name, first_number(found.get("value")), first_number(found.get("best"))) if name else None


def _quality_from_curve(target: Target | None, curves: Mapping[str, Curve]) -> Quality | None:
    curve = curves.get(target.name) if target else None
    finite = [value for value in curve.values if math.isfinite(value)] if curve else []
    if target is None or not finite:
        return None
    return Quality(target.name, finite[-1], min(finite) if target.mode == "min" else max(finite))


def _target(value: Any) -> Target | None:
    found = _mapping(value)
    name, number = text_of(found.get("name")) or text_of(found.get("metric")), first_number(found.get("value"))
    return Target(name, number, text_of(found.get("mode")) or "max") if name and number is not None else None


def _reached(value: Any) -> Reached | None:
    at = _mapping(value)
    seconds = first_number(at.get("seconds"))
    rest = (_first_integer(at.get(key)) for key in ("step", "epoch", "samples"))
    return None if seconds is None else Reached(seconds, *rest)


def _optimization(value: Any) -> PlannedOptimization:
    line = _mapping(value)
    name, verdict, reason, stage, grade = (
        text_of(line.get(k)) for k in ("name", "verdict", "reason", "stage", "grade")
    )
    return PlannedOptimization(name, verdict, reason, stage, grade, _changes(line.get("changes")))


def _outcome_tables(record: Mapping[str, Any], problems: list[str]) -> tuple[OutcomeTable, ...]:
    if record and not isinstance(record.get("optimizations"), list):
        problems.append(f"optimizations.json holds no tables: {OPTIONAL_FILES['optimizations.json']}.")
    tables: list[OutcomeTable] = []
    damaged = 0
    for told in map(_mapping, _list(record.get("optimizations"))):
        name, error = text_of(told.get("name")) or "an optimization without a name", text_of(told.get("error"))
        if error:
            problems.append(f"{name} failed to tell what it did over the run: {error}")
        found = [_outcome_table(name, value) for value in _list(told.get("tables"))]
        tables += filter(None, found)
        damaged += found.count(None)
    if damaged:
        problems.append(f"optimizations.json: tables that are damaged and left out: {damaged}.")
    return tuple(tables)


def _outcome_table(optimization: str, value: Any) -> OutcomeTable | None:
    """Return the table, or None where one row doesn't fit: its other numbers may stand in the wrong columns too."""
    table = _mapping(value)
    columns, rows = table.get("columns"), table.get("rows")
    if not isinstance(columns, list) or not isinstance(rows, list) or not all(isinstance(c, str) for c in columns):
        return None
    if not all(isinstance(row, list) and len(row) == len(columns) and all(map(_is_cell, row)) for row in rows):
        return None
    title, note = text_of(table.get("title")), text_of(table.get("note"))
    return OutcomeTable(optimization, title, tuple(columns), tuple(map(tuple, rows)), note)


def _is_cell(value: Any) -> bool:
    return value is None or (isinstance(value, (str, int, float)) and not isinstance(value, bool))


def _changes(value: Any) -> tuple[str, ...]:
    """Return a sentence for each kind of change: a full model would have hundreds of lines, one for each weight."""
    places: dict[str, list[tuple[str, int]]] = {}
    for change in map(_mapping, _list(value)):
        place = (text_of(change.get("path")), _first_integer(change.get("count"), 1) or 1)
        places.setdefault(text_of(change.get("what")), []).append(place)
    return tuple(_change_sentence(what, found) for what, found in places.items())


def _change_sentence(what: str, places: Sequence[tuple[str, int]]) -> str:
    count, (first, _), (last, _) = sum(count for _, count in places), places[0], places[-1]
    words = f"{first}: {what}" if len(places) == 1 else f"{what} in {len(places):,} places, from {first} to {last}"
    return f"{words} ({count:,} times)" if count > len(places) else words
