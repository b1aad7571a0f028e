"""The packing plan: how many rows hold which lengths, and which sequence goes into which row in an epoch.

The plan needs the histogram alone. Dealing sequences to it works on arrays of indices, never on samples.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fasttrain.callbacks.sequence_packing.best_fit import OpenRows, as_arrays, best_fit_decreasing
from fasttrain.callbacks.sequence_packing.mixture import mixture_rows
from fasttrain.callbacks.sequence_packing.patterns import Patterns, count_of_patterns
from fasttrain.errors import ConfigError

Method = Literal["auto", "mixture", "best_fit"]
Members = NDArray[Any]
"""(rows, sequences a row), int32 or int64: indices of sequences, -1 where a place is empty."""

# The mixture's time grows with the cube of the number of lengths: seconds for 512, minutes for 1024.
MOST_LENGTHS, MOST_PATTERNS = 640, 100_000


@dataclass(frozen=True)
class PackingPlan:
    """Rows by the lengths that they hold."""

    max_length: int
    max_sequences: int
    method: str
    patterns: Patterns
    """(patterns, max_sequences), ascending, 0 where a row has fewer sequences."""
    counts: NDArray[np.int64]
    """(patterns,) rows of each."""

    @cached_property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.counts.sum())

    @cached_property
    def sequences(self) -> int:
        """Number of sequences in all rows."""
        return int(((self.patterns > 0).sum(axis=1) * self.counts).sum())

    @cached_property
    def tokens(self) -> int:
        """Number of tokens in all rows, without padding."""
        return int((self.patterns.sum(axis=1, dtype=np.int64) * self.counts).sum())

    @property
    def histogram(self) -> NDArray[np.int64]:
        """(max_length + 1,) number of sequences by length."""
        counted = np.zeros(self.max_length + 1, dtype=np.int64)
        for place in range(self.max_sequences):
            np.add.at(counted, self.patterns[:, place], self.counts)
        counted[0] = 0
        return counted

    @property
    def efficiency(self) -> float:
        """Share of the rows' places that hold a token; 1 for a plan without rows."""
        return self.tokens / (self.rows * self.max_length) if self.rows else 1.0

    @property
    def sequences_per_row(self) -> float:
        """Mean number of sequences in a row: how many times fewer rows there are than with one sequence in each."""
        return self.sequences / self.rows if self.rows else 1.0

    @property
    def padded_fill(self) -> float:
        """Share of places that hold a token when each sequence has a row of its own."""
        return self.tokens / (self.sequences * self.max_length) if self.sequences else 1.0


def make_plan(
    histogram: NDArray[np.int64], *, max_length: int, max_sequences: int = 3, method: Method = "auto"
) -> PackingPlan:
    """Return a plan in which every sequence of a histogram has a place.

    Args:
        histogram: (max_length + 1,) number of sequences by length.
        max_length: tokens in a row.
        max_sequences: most sequences in a row.
        method: `mixture` is the submission's (see `mixture.py`), `best_fit` is best-fit-decreasing, `auto` takes the
            better of the two where the mixture is a matter of seconds, and best fit elsewhere.

    Raises:
        ConfigError: values that no plan can be made for.
    """
    if max_sequences < 1 or max_length < 1 or len(histogram) != max_length + 1:
        raise ConfigError(
            f"a plan of rows with {max_sequences} sequences and {max_length} tokens, from a histogram with "
            f"{len(histogram)} entries, can't be made; both must be at least 1, and the entries one more than tokens."
        )
    within_seconds = max_length <= MOST_LENGTHS and count_of_patterns(max_length, max_sequences) <= MOST_PATTERNS
    made: list[PackingPlan] = []
    if method == "best_fit" or method == "auto":
        rows = OpenRows(max_length, max_sequences)
        best_fit_decreasing(histogram, rows)
        made.append(_plan(rows, "best_fit"))
    if method == "mixture" or (method == "auto" and within_seconds and histogram.any()):
        made.append(_plan(mixture_rows(histogram, max_length, max_sequences), "mixture"))
    return min(made, key=lambda plan: plan.rows)


def deal(
    plan: PackingPlan,
    lengths: NDArray[Any],
    *,
    seed: int,
    epoch: int = 0,
    shuffle: bool = True,
    out: Path | None = None,
) -> Members:
    """Return which sequences are in each row, (rows, max_sequences), -1 for none: each sequence exactly once.

    Sequences of the same length are interchangeable: (seed, epoch) sets which of them goes where, and the rows' order.
    For 16 million sequences it takes some seconds and half a gigabyte.

    Args:
        plan: of these lengths' histogram.
        lengths: (sequences,), may be a file mapped into memory.
        shuffle: otherwise sequences and rows come in the order of the plan, the same every epoch.
        out: .npy file to write the result to; it is returned mapped into memory.

    Raises:
        ValueError: the plan was made for another histogram.
    """
    kind = np.uint16 if plan.max_length < 1 << 16 else np.int32  # numpy sorts 16 bits by radix, at a tenth of the time
    index = np.int32 if len(lengths) < 2**31 - 1 else np.int64
    random = np.random.default_rng((seed, epoch))
    order = np.arange(len(lengths), dtype=index)
    if shuffle:
        random.shuffle(order)
    shuffled = np.asarray(lengths).astype(kind)[order]
    by_length = order[np.argsort(shuffled, kind="stable")]
    if not np.array_equal(np.bincount(shuffled, minlength=plan.max_length + 1), plan.histogram):
        raise ValueError("the plan was made for another histogram than that of these lengths")
    del shuffled
    places = np.repeat(plan.patterns.astype(kind), plan.counts, axis=0)
    which = np.argsort(places.ravel(), kind="stable")[places.size - len(order) :]
    members = np.full(places.shape, -1, dtype=index)
    members.reshape(-1)[which] = by_length
    del places, which, by_length, order
    if shuffle:
        members = members[random.permutation(len(members)).astype(index)]
    if out is None:
        return members
    np.save(out, members)
    mapped: Members = np.load(out, mmap_mode="r")
    return mapped


def whole_batches(members: Members, multiple: int) -> Members:
    """Return the rows with so many more that their number is a multiple of `multiple`.

    Rows with several sequences are split in two; where there are too few of them, empty rows are put at the end. So all
    ranks have the same number of full batches, and still every sequence comes exactly once.
    """
    missing = -len(members) % multiple
    while missing:
        counts = (members >= 0).sum(axis=1)
        several = np.flatnonzero(counts > 1)[:missing]
        if not len(several):
            return np.concatenate([members, np.full((missing, members.shape[1]), -1, dtype=members.dtype)])
        members = np.array(members)
        last = members.shape[1] - 1 - np.argmax(members[several, ::-1] >= 0, axis=1)
        added = np.full((len(several), members.shape[1]), -1, dtype=members.dtype)
        added[:, 0] = members[several, last]
        members[several, last] = -1
        members = np.concatenate([members, added])
        missing -= len(several)
    return members


def _plan(rows: OpenRows, method: str) -> PackingPlan:
    patterns, counts = as_arrays(rows.all_rows().items(), rows.max_sequences)
    return PackingPlan(rows.max_length, rows.max_sequences, method, patterns, counts)
