"""The table of an ablation, from its rows: for a terminal and for a document alike."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from fasttrain.ablation import (
    ALL,
    ALLOWED,
    COLD_START,
    FAILED,
    LOSSES,
    MEMORY,
    NONE,
    ONLY,
    RATE,
    REFUSED,
    START,
    WITHOUT,
    Measured,
)  # fmt: skip
from fasttrain.measure import Row

HEADER = ("", "alone, samples/s", "against none", "without it, samples/s", "against all", "memory, GB", "start-up, s",
          "losses")  # fmt: skip
FOOTNOTE = (
    "Memory, start-up and losses are those of the optimization alone. In brackets: within the spread (p10 to p90) of "
    "either. Losses: distance from the plain run's first ones, of what is allowed."
)

Cells = dict[tuple[str, str], Row]


def cells_of(rows: Iterable[Row], case: str) -> Cells:
    """Return a case's rows by variant and metric; of several the last."""
    return {(row.variant, row.metric): row for row in rows if row.case == case}


def names_in(cells: Cells) -> list[str]:
    """Return the optimizations that a case looks at one by one, in the order of its rows."""
    parts = [(variant, prefix) for variant, _ in cells for prefix in (ONLY, WITHOUT) if variant.startswith(prefix)]
    return list(dict.fromkeys(variant.removeprefix(prefix) for variant, prefix in parts))


def lines_of(cells: Cells) -> list[list[str]]:
    """Return the table's lines below its header: nothing on, everything on, and each optimization."""
    none, everything = cells.get((NONE, RATE)), cells.get((ALL, RATE))
    lines = [
        ["nothing", *_measured(cells, NONE, None), "", "", *_costs(cells, NONE)],
        ["everything", *_measured(cells, ALL, none), "", "", *_costs(cells, ALL)],
    ]
    for name in names_in(cells):
        only, without = ONLY + name, WITHOUT + name
        line = [name, *_measured(cells, only, none), *_measured(cells, without, everything), *_costs(cells, only)]
        lines.append(line)
    if (cold := cells.get((ALL, COLD_START))) is not None:
        lines[1][6] += f", the first time {cold.value:.3g}"
    return lines


def reasons_of(cells: Cells) -> list[str]:
    """Return a sentence for each reason why variants were not measured."""
    words = {REFUSED: "does not apply", FAILED: "failed"}
    variants: dict[str, list[str]] = defaultdict(list)
    for (variant, metric), row in cells.items():
        alone = ONLY + variant.removeprefix(WITHOUT)
        # What does not even apply alone need not be said of a second time.
        if metric in words and not (metric == REFUSED and variant != alone and (alone, REFUSED) in cells):
            variants[f"{words[metric]}: {row.note}"].append(variant)
    return [f"{', '.join(names)}: {reason}" for reason, names in variants.items()]


def progress_line(measured: Measured) -> str:
    """Return one line of what came of a variant."""
    cells = {row.metric: row for row in measured.rows}
    label = f"[{measured.number}/{measured.count}] {measured.variant}"
    if (row := cells.get(COLD_START)) is not None:
        return f"{label}: the first start took {row.value:.3g} s"
    if (row := cells.get(RATE)) is not None:
        words = f"{_rate(row.value)} samples/s (p10 {_rate(row.p10)}, p90 {_rate(row.p90)})"
        memory, start, losses = _costs({(row.variant, row.metric): row for row in measured.rows}, measured.variant)
        costs = [
            f"{memory} GB" if memory else "",
            f"start-up {start} s" if start else "",
            f"losses {losses}" * bool(losses),
        ]
        return ", ".join([f"{label}: {words}", *filter(None, costs)])
    reasons = [f"{row.metric}: {row.note}" for row in measured.rows]
    return f"{label}: {'; '.join(reasons) or measured.error or 'not measured'}"


def print_table(rows: Sequence[Row], case: str, not_reached: Sequence[str], console: Console) -> None:
    """Print the table, the reasons for what is missing in it, and what the time did not suffice for."""
    cells = cells_of(rows, case)
    if not cells:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(HEADER):
        justify: Any = "left" if number in (0, len(HEADER) - 1) else "right"
        table.add_column(name, justify=justify, no_wrap=number == 0)
    for line in lines_of(cells):
        table.add_row(*line)
    console.print(table)
    for sentence in [FOOTNOTE, *reasons_of(cells)]:
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)
    if not_reached:
        console.print(f"not reached in the time given: {', '.join(not_reached)}", style="yellow", highlight=False)


def _measured(cells: Cells, variant: str, against: Row | None) -> tuple[str, str]:
    """Return a variant's rate and its gain over another."""
    row = cells.get((variant, RATE))
    if row is None:
        return _why_not(cells, variant), ""
    if against is None:
        return _rate(row.value), ""
    ratio = row.value / against.value
    gain = f"{ratio:.2f} times" if ratio >= 1.5 else f"{ratio - 1:+.1%}"
    overlap = row.p10 <= against.p90 and against.p10 <= row.p90
    return _rate(row.value), f"({gain})" if overlap else gain


def _costs(cells: Cells, variant: str) -> tuple[str, str, str]:
    memory, start = cells.get((variant, MEMORY)), cells.get((variant, START))
    return (
        f"{memory.value:.3g}" if memory is not None else "",
        f"{start.value:.3g}" if start is not None else "",
        _losses(cells.get((variant, LOSSES)), cells.get((variant, ALLOWED))),
    )


def _losses(found: Row | None, allowed: Row | None) -> str:
    if found is None or allowed is None:
        return ""
    verdict = "same" if found.value <= allowed.value else "DIFFER"
    return f"{verdict}: {found.value:.1e} of {allowed.value:.1e}"


def _why_not(cells: Cells, variant: str) -> str:
    for metric in (REFUSED, FAILED):
        if (variant, metric) in cells:
            return metric
    return ""


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
