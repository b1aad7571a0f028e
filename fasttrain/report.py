"""Run folders read back: a summary of each run, and the tables that show and compare them.

Neither torch nor lightning is imported, so that a report opens at once, on machines without them too. A file that is
missing or cut short costs what it held and a sentence in `RunSummary.problems`, never the report.
"""

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fasttrain.errors import ConfigError

RUN_FILES = {
    "config.yaml": "its settings are unknown, and it can't be grouped with runs that differ by seed",
    "environment.json": "the machine and the versions are unknown",
    "plan.json": "which optimizations were on is unknown",
    "metrics.csv": "there are no curves to draw",
    "result.json": "the run crashed or is still going, and its totals are read off metrics.csv as far as that goes",
}
"""The files of a run folder, and what a report can't say without each."""

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
    environment = _read_mapping(path / "environment.json", problems)
    config = _read_mapping(path / "config.yaml", problems)
    curves = _read_metrics(path / "metrics.csv", problems)
    target = _target(result.get("target")) or _target(config.get("target"))
    rates = curves.get("samples_per_second")
    return RunSummary(
        path=path,
        recipe=_text(result.get("recipe")) or _text(config.get("recipe")) or "unknown recipe",
        status=_text(result.get("status")) or "unknown",
        error=_text(result.get("error")) or None,
        seed=_first_integer(result.get("seed"), config.get("seed")),
        quality=_quality(result.get("quality")) or _quality_from_curve(target, curves),
        target=target,
        reached=_reached(result.get("reached_at")) if result.get("reached") is not False else None,
        samples=_first_integer(result.get("samples")),
        steps=_first_integer(result.get("steps"), max((c.steps[-1] for c in curves.values()), default=None)),
        epochs=_first_integer(result.get("epochs")),
        seconds=_first_number(result.get("seconds"), max((max(c.seconds) for c in curves.values()), default=None)),
        samples_per_second=_first_number(result.get("samples_per_second"), fmean(rates.values) if rates else None),
        breakdown_seconds=_numbers(result.get("breakdown_seconds")),
        bad_samples=_mapping(result.get("bad_samples")),
        environment=environment,
        optimizations=tuple(map(_optimization, _list(plan["optimizations"]))) if "optimizations" in plan else None,
        config=config,
        config_text=_read_text(path / "config.yaml"),
        curves=curves,
        # The sheet shows the other pictures once more.
        pictures=tuple(sorted(p for p in (path / "samples").glob("*.png") if p.stem != "contact-sheet")),
        problems=tuple(problems),
    )


def _require_run_folder(path: Path) -> None:
    holds = ", ".join(RUN_FILES)
    if not path.exists():
        raise ConfigError(f"'{path}' does not exist; a run folder is written by `fasttrain fit` and holds {holds}.")
    if not path.is_dir():
        raise ConfigError(f"'{path}' is a file, not a run folder; give the folder that holds {holds}.")
    if not any((path / name).is_file() for name in RUN_FILES):
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
    loss = RUN_FILES[path.name]
    if not path.is_file():
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


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _first_number(*values: Any) -> float | None:
    for value in values:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            continue
        if math.isfinite(number):
            return number
    return None


def _first_integer(*values: Any) -> int | None:
    number = _first_number(*values)
    return None if number is None else int(number)


def _numbers(value: Any) -> dict[str, float]:
    return {key: number for key, item in _mapping(value).items() if (number := _first_number(item)) is not None}


def _quality(value: Any) -> Quality | None:
    found = _mapping(value)
    name = _text(found.get("name"))
    return Quality(name, _first_number(found.get("value")), _first_number(found.get("best"))) if name else None


def _quality_from_curve(target: Target | None, curves: Mapping[str, Curve]) -> Quality | None:
    curve = curves.get(target.name) if target else None
    finite = [value for value in curve.values if math.isfinite(value)] if curve else []
    if target is None or not finite:
        return None
    return Quality(target.name, finite[-1], min(finite) if target.mode == "min" else max(finite))


def _target(value: Any) -> Target | None:
    found = _mapping(value)
    name, number = _text(found.get("name")) or _text(found.get("metric")), _first_number(found.get("value"))
    return Target(name, number, _text(found.get("mode")) or "max") if name and number is not None else None


def _reached(value: Any) -> Reached | None:
    at = _mapping(value)
    seconds = _first_number(at.get("seconds"))
    rest = (_first_integer(at.get(key)) for key in ("step", "epoch", "samples"))
    return None if seconds is None else Reached(seconds, *rest)


def _optimization(value: Any) -> PlannedOptimization:
    line = _mapping(value)
    name, verdict, reason, stage, grade = (_text(line.get(k)) for k in ("name", "verdict", "reason", "stage", "grade"))
    return PlannedOptimization(name, verdict, reason, stage, grade, _changes(line.get("changes")))


def _changes(value: Any) -> tuple[str, ...]:
    """Return a sentence for each kind of change: a full model would have hundreds of lines, one for each weight."""
    places: dict[str, list[tuple[str, int]]] = {}
    for change in map(_mapping, _list(value)):
        place = (_text(change.get("path")), _first_integer(change.get("count"), 1) or 1)
        places.setdefault(_text(change.get("what")), []).append(place)
    return tuple(_change_sentence(what, found) for what, found in places.items())


def _change_sentence(what: str, places: Sequence[tuple[str, int]]) -> str:
    count, (first, _), (last, _) = sum(count for _, count in places), places[0], places[-1]
    words = f"{first}: {what}" if len(places) == 1 else f"{what} in {len(places):,} places, from {first} to {last}"
    return f"{words} ({count:,} times)" if count > len(places) else words


@dataclass(frozen=True)
class TextTable:
    """A table as the console and the page both show it; `align` has one l or r per column."""

    title: str
    columns: tuple[str, ...]
    align: str
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def format_duration(seconds: float | None) -> str:
    """Return a wall time with two units at most: 850 ms, 43.2 s, 2 min 05 s, 1 h 04 min."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms" if seconds else "0 s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def format_number(value: float | None, digits: int = 3) -> str:
    """Return a number with so many significant digits, or more where it is large: 0.0512, 3.14, 161, 12,480."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def format_score(value: float | None) -> str:
    """Return a score to four decimals, as COCO's mAP is compared."""
    return UNKNOWN if value is None else f"{value:.4f}"


def format_target(target: Target | None) -> str:
    """Return a target as a condition: map ≥ 0.4."""
    return f"{target.name} {'≤' if target.mode == 'min' else '≥'} {target.value:g}" if target else "no target"


def run_labels(runs: Sequence[RunSummary]) -> list[str]:
    """Return the shortest endings of the runs' paths that tell them apart."""
    parts = [run.path.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts), default=0) + 1):
        labels = ["/".join(p[-depth:]) for p in parts]
        if len(set(labels)) == len(set(parts)):
            break
    return labels if runs else []


def status_words(run: RunSummary) -> str:
    """Return how the run ended in words."""
    return "no result" if run.status == "unknown" else run.status.replace("_", " ")


def hardware(run: RunSummary) -> str:
    """Return the accelerator's name, or the processor's on a machine without one."""
    return _text(run.environment.get("gpu")) or _text(run.environment.get("cpu")) or "unknown machine"


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) of every leaf of nested mappings; None reads as a dash."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            yield f"{prefix}{key}", ", ".join(map(str, value)) or UNKNOWN
        else:
            yield f"{prefix}{key}", UNKNOWN if value is None else str(value)


def breakdown(run: RunSummary) -> list[tuple[str, float, float]]:
    """Return (name in words, seconds, share of all) of where the run's time went; empty where that is unknown."""
    total = sum(run.breakdown_seconds.values())
    parts = run.breakdown_seconds.items() if total > 0 else ()
    return [(name.replace("_", " "), seconds, seconds / total) for name, seconds in parts]


def headline(run: RunSummary) -> str:
    """Return one sentence that says how the run ended."""
    quality = f"{q.name} {format_score(q.best)}" if (q := run.quality) and q.best is not None else "no score"
    if run.reached:
        where = [f"{name} {value:,}" for name, value in (("epoch", run.reached.epoch), ("step", run.reached.step))
                 if value is not None]  # fmt: skip
        at = f" ({', '.join(where)})" if where else ""
        return f"Reached {format_target(run.target)} after {format_duration(run.reached.seconds)}{at}."
    end = "No result was written; last seen" if run.status == "unknown" else run.status.replace("_", " ").capitalize()
    goal = f", short of {format_target(run.target)}" if run.target and run.status in NOT_REACHED else ""
    return f"{end} after {format_duration(run.seconds)} with {quality}{goal}."


def facts(run: RunSummary) -> list[tuple[str, str]]:
    """Return the run's main numbers as (label, text)."""
    name = run.quality.name if run.quality else "score"
    lines = [
        ("status", status_words(run)),
        (f"{name}, last", format_score(run.quality.value if run.quality else None)),
        (f"{name}, best", format_score(run.quality.best if run.quality else None)),
        ("target", format_target(run.target)),
        ("time to target", time_to_target(run)),
        ("whole run", format_duration(run.seconds)),
        ("samples/s", format_number(run.samples_per_second)),
        ("samples", UNKNOWN if run.samples is None else f"{run.samples:,}"),
        ("steps", UNKNOWN if run.steps is None else f"{run.steps:,}"),
        ("epochs", UNKNOWN if run.epochs is None else f"{run.epochs:,}"),
        ("seed", UNKNOWN if run.seed is None else str(run.seed)),
        ("hardware", hardware(run)),
    ]
    bad = [f"{key.replace('_', ' ')} {text}" for key, text in flatten(run.bad_samples) if text not in ("0", UNKNOWN)]
    return [*lines, ("bad samples", ", ".join(bad))] if bad else lines


def time_to_target(run: RunSummary) -> str:
    """Return when the target was reached, or in words why there is no such time."""
    if run.reached:
        return format_duration(run.reached.seconds)
    return UNKNOWN if run.status == "unknown" else "not reached" if run.target else "no target"


def breakdown_table(run: RunSummary) -> TextTable:
    """Return where the time went, in seconds and shares of the whole."""
    rows = tuple(
        (name, format_duration(s), f"{share:.1%}", "█" * round(share * 30)) for name, s, share in breakdown(run)
    )
    return TextTable("Where the time went", ("part", "time", "share", ""), "lrrl", rows)


def plan_table(run: RunSummary) -> TextTable:
    """Return each optimization of the plan with its verdict, and what it changed or why it didn't."""
    rows = tuple(
        (line.name, line.verdict, line.grade, line.stage, "\n".join(filter(None, (line.reason, *line.changes))))
        for line in run.optimizations or ()
    )
    return TextTable("Optimizations", ("name", "verdict", "grade", "stage", "why, and what changed"), "lllll", rows)


def comparison_table(runs: Sequence[RunSummary]) -> TextTable:
    """Return one row per run, in the order given; what is the same for all of several runs moves to the note."""
    columns: dict[str, list[str]] = {
        "run": run_labels(runs),
        "seed": [UNKNOWN if run.seed is None else str(run.seed) for run in runs],
        "quality": [f"{q.name} {format_score(q.value)}" if (q := run.quality) else UNKNOWN for run in runs],
        "time to target": [time_to_target(run) for run in runs],
        "samples/s": [format_number(run.samples_per_second) for run in runs],
        "status": [status_words(run) for run in runs],
        "recipe": [run.recipe for run in runs],
        "target": [format_target(run.target) for run in runs],
        "hardware": [hardware(run) for run in runs],
        "on": [_switched_on(run) for run in runs],
    }
    movable = ("seed", "recipe", "target", "hardware", "on")
    shared = [name for name in movable if len(runs) > 1 and len(set(columns[name])) == 1]
    note = "The same for all: " + ", ".join(f"{name} {columns[name][0]}" for name in shared) + "." if shared else ""
    shown = {name: cells for name, cells in columns.items() if name not in shared}
    align = "".join("r" if name in ("time to target", "samples/s") else "l" for name in shown)
    return TextTable("Runs", tuple(shown), align, tuple(zip(*shown.values(), strict=True)), note)


def _switched_on(run: RunSummary) -> str:
    names = [line.name for line in run.optimizations or () if line.verdict == "applies"]
    return UNKNOWN if run.optimizations is None else ", ".join(names) or "plain"


def seed_tables(runs: Sequence[RunSummary]) -> list[TextTable]:
    """Return mean, minimum and maximum of each group of runs that differ by their seed alone.

    Runs of one group have the same recipe, configuration (but for what is called seed in it) and hardware. Those that
    failed or were interrupted are left out and counted in the note, as are those that never reached the target where
    times to it are averaged.
    """
    groups: dict[str, list[RunSummary]] = {}
    for run in runs:
        if run.config and run.seed is not None:
            same = [(name, text) for name, text in flatten(run.config) if name.rpartition(".")[2] != "seed"]
            key = json.dumps([run.recipe, hardware(run), sorted(same)])
            groups.setdefault(key, []).append(run)
    return [_seed_table(group) for group in groups.values() if len({run.seed for run in group}) > 1]


def _seed_table(group: Sequence[RunSummary]) -> TextTable:
    ended = [run for run in group if run.status in ("reached_target", "finished")]
    reached = [run.reached.seconds for run in ended if run.reached]
    name = next((run.quality.name for run in ended if run.quality), "score")
    measures = (
        (f"{name}, last", format_score, [run.quality.value if run.quality else None for run in ended]),
        (f"{name}, best", format_score, [run.quality.best if run.quality else None for run in ended]),
        ("time to target", format_duration, reached),
        ("samples/s", format_number, [run.samples_per_second for run in ended]),
        ("whole run", format_duration, [run.seconds for run in ended]),
    )
    rows = []
    for label, form, found in measures:
        values = [value for value in found if value is not None]
        if values:
            rows.append((label, form(fmean(values)), form(min(values)), form(max(values)), str(len(values))))
    notes = (
        [f"{len(group) - len(ended)} of {len(group)} runs did not end and are left out."]
        if len(ended) < len(group)
        else []
    )
    if group[0].target and len(reached) < len(ended):
        notes.append(f"{len(reached)} of {len(ended)} reached {format_target(group[0].target)}.")
    seeds = ", ".join(map(str, sorted({run.seed for run in group if run.seed is not None})))
    title = f"{group[0].recipe} on {hardware(group[0])}, seeds {seeds}"
    return TextTable(title, ("measure", "mean", "min", "max", "runs"), "lrrrr", tuple(rows), " ".join(notes))


def benchmark_tables(rows: Iterable[Mapping[str, Any]]) -> list[TextTable]:
    """Return result rows as one table per subject and machine: a line per case and metric, variants side by side.

    `rows` have the keys of the result-row schema: csv.DictReader's rows, or asdict of measure.Row. Variants are
    compared only within one machine, software, commit and day. A speed-up is against `plain`, or `eager` where nobody
    measured plain, for times and rates; other metrics show their values alone. Of rows of one name the last is shown.
    """
    machine = ("subject", "gpu", "cpu", "torch", "cudnn", "commit")

    def group_key(row: Mapping[str, Any]) -> tuple[str, ...]:
        return (*(str(row.get(key) or "") for key in machine), str(row.get("date") or "")[:10])

    return [_benchmark_table(key, list(group)) for key, group in groupby(sorted(rows, key=group_key), key=group_key)]


def _benchmark_table(key: tuple[str, ...], rows: Sequence[Mapping[str, Any]]) -> TextTable:
    subject, gpu, cpu, torch_version, cudnn, commit, day = key
    variants = list(dict.fromkeys(str(row["variant"]) for row in rows))
    variants.sort(key=lambda name: {"plain": 0, "eager": 1, "full": 3, "floor": 4}.get(name, 2))
    cells: dict[tuple[str, str, str], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        cells.setdefault((str(row["case"]), str(row["metric"]), str(row["unit"])), {})[str(row["variant"])] = row
    table_rows = tuple(
        (*line, *(_benchmark_cell(by_variant.get(name), by_variant) for name in variants))
        for line, by_variant in cells.items()
    )
    again = len(rows) - sum(map(len, cells.values()))
    repeats = sorted({str(row["repeats"]) for row in rows if row.get("repeats")}, key=lambda text: (len(text), text))
    named = {"torch ": torch_version, "cuDNN ": cudnn, "commit ": commit, "": day, "repeats ": " or ".join(repeats)}
    named["rows measured again and not shown: "] = str(again or "")
    note = " · ".join((gpu or cpu, *(name + value for name, value in named.items() if value)))
    return TextTable(subject, ("case", "metric", "unit", *variants), "lll" + "r" * len(variants), table_rows, note)


def _benchmark_cell(row: Mapping[str, Any] | None, by_variant: Mapping[str, Mapping[str, Any]]) -> str:
    if row is None:
        return UNKNOWN
    value, p10, p90 = (_first_number(row.get(name)) for name in ("value", "p10", "p90"))
    baseline = by_variant.get("plain") or by_variant.get("eager")
    gain = _speed_up(row, baseline) if baseline is not None and baseline is not row else None
    first = format_number(value, 4) + (f"  {gain:.2f}x" if gain is not None else "")
    return first if p10 is None or p90 is None else f"{first}\n{format_number(p10, 4)} to {format_number(p90, 4)}"


def _speed_up(row: Mapping[str, Any], baseline: Mapping[str, Any]) -> float | None:
    value, base = _first_number(row.get("value")), _first_number(baseline.get("value"))
    unit = str(row.get("unit") or "").strip()
    if not value or not base:
        return None
    if unit in ("ns", "us", "µs", "ms", "s", "min", "h", "seconds", "minutes", "hours"):
        return base / value
    return value / base if unit.endswith(("/s", "/second", "per second", "per_second", "_per_s")) else None


def print_report(runs: Sequence[RunSummary], console: Console | None = None) -> None:
    """Print each run's numbers, breakdown and plan, then the comparison if there are several."""
    console = console or Console()
    for label, run in zip(run_labels(runs), runs, strict=True):
        console.rule(Text(f"{run.recipe} · {label}", style="bold"), align="left")
        console.print(Text(headline(run), style="green" if run.reached else "default"))
        for problem in filter(None, (run.error, *run.problems)):
            console.print(Text(f"! {problem}", style="yellow"))
        tables = TextTable("", ("", ""), "ll", tuple(facts(run))), breakdown_table(run), plan_table(run)
        print_tables((table for table in tables if table.rows), console)
    if len(runs) > 1:
        print_tables((comparison_table(runs), *seed_tables(runs)), console)


def print_tables(tables: Iterable[TextTable], console: Console | None = None) -> None:
    """Print tables one below the other; what looks like markup in a cell stays text."""
    console = console or Console()
    for table in tables:
        made = Table(box=SIMPLE_HEAD, show_header=any(table.columns), pad_edge=False)
        for column, side in zip(table.columns, table.align, strict=True):
            made.add_column(Text(column), justify="right" if side == "r" else "left", overflow="fold")
        for row in table.rows:
            made.add_row(*map(Text, row))
        console.print(*filter(None, (Text(table.title, style="bold"), made, Text(table.note, style="dim"))), sep="\n")
