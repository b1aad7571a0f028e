"""Run folders read back: a summary of each run, and the tables that show and compare them.

Neither torch nor lightning is imported, so that a report opens at once, on machines without them too. A file that is
missing or cut short costs what it held and a sentence in `RunSummary.problems`, never the report.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fasttrain.run_summary import (
    NOT_REACHED,
    UNKNOWN,
    Cell,
    OutcomeTable,
    RunSummary,
    Target,
    first_number,
    text_of,
)


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
    return text_of(run.environment.get("gpu")) or text_of(run.environment.get("cpu")) or "unknown machine"


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


def outcome_tables(run: RunSummary) -> list[TextTable]:
    """Return what each optimization told at the run's end; a column of numbers is right-aligned."""
    return [text_table(table) for table in run.outcome_tables]


def text_table(table: OutcomeTable) -> TextTable:
    """Return an optimization's table as the console shows it."""
    numbers = [bool(table.rows) and not any(isinstance(row[i], str) for row in table.rows)
               for i in range(len(table.columns))]  # fmt: skip
    rows = tuple(tuple(map(_cell_text, row)) for row in table.rows)
    title = ": ".join(filter(None, (table.optimization, table.title)))
    return TextTable(title, table.columns, "".join("r" if number else "l" for number in numbers), rows, table.note)


def _cell_text(cell: Cell) -> str:
    if isinstance(cell, str):
        return cell
    return f"{cell:,}" if isinstance(cell, int) else format_number(cell)


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
    value, p10, p90 = (first_number(row.get(name)) for name in ("value", "p10", "p90"))
    baseline = by_variant.get("plain") or by_variant.get("eager")
    gain = _speed_up(row, baseline) if baseline is not None and baseline is not row else None
    first = format_number(value, 4) + (f"  {gain:.2f}x" if gain is not None else "")
    return first if p10 is None or p90 is None else f"{first}\n{format_number(p10, 4)} to {format_number(p90, 4)}"


def _speed_up(row: Mapping[str, Any], baseline: Mapping[str, Any]) -> float | None:
    value, base = first_number(row.get("value")), first_number(baseline.get("value"))
    unit = str(row.get("unit") or "").strip()
    if not value or not base:
        return None
    if unit in ("ns", "us", "µs", "ms", "s", "min", "h", "seconds", "minutes", "hours"):
        return base / value
    return value / base if unit.endswith(("/s", "/second", "per second", "per_second", "_per_s")) else None


def print_report(runs: Sequence[RunSummary], console: Console | None = None, further: Sequence[TextTable] = ()) -> None:
    """Print each run's numbers, breakdown and plan, then the comparison if there are several, and further tables."""
    console = console or Console()
    for label, run in zip(run_labels(runs), runs, strict=True):
        console.rule(Text(f"{run.recipe} · {label}", style="bold"), align="left")
        console.print(Text(headline(run), style="green" if run.reached else "default"))
        for problem in filter(None, (run.error, *run.problems)):
            console.print(Text(f"! {problem}", style="yellow"))
        tables = TextTable("", ("", ""), "ll", tuple(facts(run))), breakdown_table(run), plan_table(run)
        print_tables((table for table in tables if table.rows), console)
        print_tables(outcome_tables(run), console)
    if len(runs) > 1:
        print_tables((comparison_table(runs), *seed_tables(runs)), console)
    print_tables(further, console)


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
