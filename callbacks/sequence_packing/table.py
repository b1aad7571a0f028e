"""What packing will do, in tables, before anyone trains: the lengths, the plan, and the expected speed-up."""

import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasttrain.callbacks.sequence_packing.plan import Method, PackingPlan, make_plan
from fasttrain.optimization import Table

BUCKETS = 8


def packing_tables(
    histogram: NDArray[np.int64],
    *,
    max_length: int,
    max_sequences: int = 3,
    method: Method = "auto",
    batch_size: int | None = None,
) -> list[Table]:
    """Return tables of a histogram, (max_length + 1,), of the plan's rows by number of sequences, and of the gain.

    Args:
        batch_size: of unpacked batches, to compare with padding to the longest sequence of a batch.
    """
    plan = make_plan(histogram, max_length=max_length, max_sequences=max_sequences, method=method)
    return plan_tables(plan, batch_size)


def plan_tables(plan: PackingPlan, batch_size: int | None = None) -> list[Table]:
    """Return the same of a plan that is made already."""
    return [lengths_table(plan.histogram), rows_table(plan), gain_table(plan, batch_size)]


def lengths_table(histogram: NDArray[np.int64]) -> Table:
    """Return the histogram in eight buckets."""
    longest = len(histogram) - 1
    edges = sorted({longest * part // BUCKETS for part in range(BUCKETS + 1)})
    total = max(1, int(histogram.sum()))
    rows: list[list[str | int | float]] = []
    for low, high in itertools.pairwise(edges):
        count = int(histogram[low + 1 : high + 1].sum())
        share = count / total
        rows.append([f"{low + 1} to {high}", count, round(100 * share, 2), "#" * round(40 * share)])
    mean = float(histogram @ np.arange(longest + 1)) / total
    note = f"{total:,} sequences, {mean:.1f} tokens on average"
    return Table("lengths", ("tokens", "sequences", "share %", ""), rows, note)


def rows_table(plan: PackingPlan) -> Table:
    """Return the plan's rows by how many sequences they hold."""
    held = (plan.patterns > 0).sum(axis=1)
    tokens = plan.patterns.sum(axis=1, dtype=np.int64)
    rows: list[list[str | int | float]] = []
    for number in range(1, plan.max_sequences + 1):
        count = int(plan.counts[held == number].sum())
        filled = int((tokens * plan.counts)[held == number].sum())
        share = 100 * filled / (count * plan.max_length) if count else math.nan
        rows.append([number, count, round(share, 2)])
    return Table(
        "rows", ("sequences in a row", "rows", "tokens %"), rows, f"{len(plan.counts):,} patterns, by {plan.method}"
    )


def gain_table(plan: PackingPlan, batch_size: int | None = None) -> Table:
    """Return rows, fill and expected speed-up: how many times fewer tokens are computed, padding included."""
    rows: list[list[Any]] = [
        [f"padded to {plan.max_length}", plan.sequences, round(100 * plan.padded_fill, 2), 1.0],
        ["packed", plan.rows, round(100 * plan.efficiency, 2), round(plan.sequences_per_row, 3)],
        ["no padding at all", math.ceil(plan.tokens / plan.max_length), 100.0, round(1 / plan.padded_fill, 3)],
    ]
    if batch_size:
        longest = longest_of(plan.histogram, batch_size)
        fill = plan.tokens / max(1.0, plan.sequences * longest)
        rows.insert(
            1, [f"padded to the longest of {batch_size}", plan.sequences, round(100 * fill, 2),
                round(plan.max_length / longest, 3)],
        )  # fmt: skip
    note = "of the model's work by token; attention within shorter sequences, and data that wait, come on top"
    return Table("gain", ("batches", "rows", "tokens %", "expected speed-up"), rows, note)


def longest_of(histogram: NDArray[np.int64], batch_size: int) -> float:
    """Return the mean length of the longest sequence in a random batch."""
    total = histogram.sum()
    if not total:
        return float(len(histogram) - 1)
    none_longer = (np.cumsum(histogram) / total) ** batch_size
    return float((1 - none_longer[:-1]).sum())
