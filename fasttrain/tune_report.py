"""What `fasttrain tune` prints: a line for each site as it is measured, and the table of all at the end."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fasttrain.choices import ALTERNATIVES, COMPILE, OURS, PLAIN, Measured
from fasttrain.measure import ms_text
from fasttrain.site_key import Call


@dataclass(frozen=True)
class SiteRow:
    """Sites of one room that are the same."""

    room: str
    paths: Sequence[str]
    count: int
    """Of different modules at the paths."""
    calls: Sequence[Call]
    measured: Measured | None
    why_not: str

    @property
    def place(self) -> str:
        """The first path, and how many there are."""
        return self.paths[0] if self.count == 1 else f"{self.paths[0]} x{self.count}"

    def saved_ms(self, alternative: str) -> float:
        """Return what an alternative saves at all of the sites together, in a step."""
        return self.measured.saved_ms(alternative) * self.count if self.measured else 0.0


@dataclass
class Outcome:
    """Everything that a tuning has found out."""

    recipe: str
    device: str
    precision: str
    step_ms: float
    """The whole training step, with no optimization applied."""
    idle: dict[str, str]
    """A room, or a room and a path -> why there is nothing to measure."""
    file: Path
    not_measured: dict[str, str] = field(default_factory=dict)
    """Site key -> why."""
    rows: list[SiteRow] = field(default_factory=list)


def progress_line(label: str, measured: Measured | None, why_not: str) -> str:
    """Return the line for a site that was just measured, or could not be."""
    if measured is None:
        return f"{label}: not measured, {why_not}"
    times = ", ".join(f"{name} {ms_text(timing.median_ms)}" for name, timing in measured.times.items())
    return f"{label}: {times} ms; the fastest is {measured.winner()}"


def print_outcome(outcome: Outcome, console: Console, compiled: bool) -> None:
    """Print the table, what was not measured, what each room saves, and where it is kept."""
    console.print()
    if any(row.measured for row in outcome.rows):
        console.print(sites_table(outcome))
        console.print()
    for line in [*missing_lines(outcome), *saving_lines(outcome, compiled)]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(f"kept in {outcome.file}", highlight=False, markup=False, soft_wrap=True)


def sites_table(outcome: Outcome) -> Table:
    """Return a row for each kind of site that was measured, the one that saves most first."""
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left", title_style="")
    table.title = f"{outcome.device}, {outcome.precision}: forward and backward in a step, milliseconds of one site"
    table.add_column("room", no_wrap=True)
    table.add_column("site", overflow="fold")
    table.add_column("inputs", overflow="fold")
    for name in ALTERNATIVES:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("fastest", no_wrap=True)
    table.add_column("saves of the step", justify="right", no_wrap=True)
    measured = [row for row in outcome.rows if row.measured is not None]
    for row in sorted(measured, key=_saved_by_winner, reverse=True):
        assert row.measured is not None
        winner, saved = row.measured.winner(), _saved_by_winner(row)
        times = [_time_text(row.measured, name) for name in ALTERNATIVES]
        share = f"{ms_text(saved)} ms, {saved / outcome.step_ms:.1%}" if winner != PLAIN else "-"
        style = {PLAIN: "dim", COMPILE: "yellow", OURS: "green"}[winner]
        table.add_row(row.room, Text(row.place), Text(inputs_text(row.calls)), *times, Text(winner, style), share)
    return table


def inputs_text(calls: Sequence[Call]) -> str:
    """Return the first call's inputs, and how many calls there are."""
    more = f" and {len(calls) - 1} more call{'s' * (len(calls) != 2)}" if len(calls) > 1 else ""
    return f"{calls[0]}{more}"


def missing_lines(outcome: Outcome) -> list[str]:
    """Return why a site was not measured, a line each, and why an alternative was not, a line for each reason."""
    lines = [f"{what}: {why}" for what, why in outcome.idle.items()]
    counted: dict[str, int] = defaultdict(int)
    for row in outcome.rows:
        if row.measured is None:
            lines.append(f"{row.room} {row.place}: not measured, {row.why_not}; the room's own check decides")
            continue
        if row.why_not:
            lines.append(f"{row.room} {row.place}: not measured again, {row.why_not}")
        for name, why in row.measured.missing.items():
            counted[f"{row.room}: no time of {name}, {why}"] += len(row.paths)
    return lines + [f"{text} ({count} site{'s' * (count != 1)})" for text, count in counted.items()]


def saving_lines(outcome: Outcome, compiled: bool) -> list[str]:
    """Return a line for each room: where it is the fastest and what that saves, and where the compiler is."""
    by_room: dict[str, list[SiteRow]] = defaultdict(list)
    for row in outcome.rows:
        if row.measured is not None:
            by_room[row.room].append(row)
    return [_saving_line(room, rows, outcome.step_ms, compiled) for room, rows in by_room.items()]


def _saving_line(room: str, rows: Sequence[SiteRow], step_ms: float, compiled: bool) -> str:
    able = ALTERNATIVES if compiled else (PLAIN, OURS)
    ours = [row for row in rows if row.measured is not None and row.measured.winner(able) == OURS]
    compiler = [row for row in rows if row.measured is not None and row.measured.winner() == COMPILE]
    saved, total = sum(row.saved_ms(OURS) for row in ours), sum(len(row.paths) for row in rows)
    text = f"{room}: to be used at {sum(len(row.paths) for row in ours)} of {total} sites"
    if ours:
        text += f", saves {ms_text(saved)} ms of {ms_text(step_ms)} ms a step ({saved / step_ms:.1%})"
    if compiler:
        saved, count = sum(row.saved_ms(COMPILE) for row in compiler), sum(len(row.paths) for row in compiler)
        advice = "" if compiled else "; ask for the optimization `compile`"
        text += f"; torch.compile is the fastest at {count}, saves {ms_text(saved)} ms{advice}"
    return text


def _saved_by_winner(row: SiteRow) -> float:
    return row.saved_ms(row.measured.winner()) if row.measured is not None else 0.0


def _time_text(measured: Measured, name: str) -> str:
    return ms_text(measured.times[name].median_ms) if name in measured.times else "-"
