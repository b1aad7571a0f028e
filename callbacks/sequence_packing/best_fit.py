"""Best-fit-decreasing over a histogram: longest sequences first, each into the row whose gap it fills best."""

from bisect import bisect_left, insort
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from fasttrain.callbacks.sequence_packing.patterns import Patterns

Lengths = tuple[int, ...]


class OpenRows:
    """Rows that are not full yet, by the gap they have left; rows of one pattern are kept as one entry with a count."""

    def __init__(self, max_length: int, max_sequences: int) -> None:
        self.max_length, self.max_sequences = max_length, max_sequences
        self.done: dict[Lengths, int] = {}
        self._by_gap: dict[int, list[tuple[Lengths, int]]] = {}
        self._gaps: list[int] = []

    def put(self, lengths: Lengths, count: int) -> None:
        """Add rows that hold sequences of these lengths."""
        gap = self.max_length - sum(lengths)
        if gap == 0 or len(lengths) == self.max_sequences:
            self.done[lengths] = self.done.get(lengths, 0) + count
            return
        if gap not in self._by_gap:
            self._by_gap[gap] = []
            insort(self._gaps, gap)
        self._by_gap[gap].append((lengths, count))

    def take(self, least_gap: int, most: int) -> tuple[Lengths, int] | None:
        """Take out at most so many rows of one pattern, with the smallest gap that is large enough."""
        place = bisect_left(self._gaps, least_gap)
        if place == len(self._gaps):
            return None
        gap = self._gaps[place]
        lengths, count = self._by_gap[gap].pop()
        if count > most:
            self._by_gap[gap].append((lengths, count - most))
        elif not self._by_gap[gap]:
            del self._by_gap[gap], self._gaps[place]
        return lengths, min(count, most)

    def all_rows(self) -> dict[Lengths, int]:
        """Return every pattern, full or not, with its count."""
        rows = dict(self.done)
        for entries in self._by_gap.values():
            for lengths, count in entries:
                rows[lengths] = rows.get(lengths, 0) + count
        return rows


def best_fit_decreasing(histogram: NDArray[np.int64], rows: OpenRows) -> None:
    """Put every sequence of a histogram into the rows, opening new ones where none has room.

    `rows` is changed. The result is that of best-fit-decreasing, sequence by sequence, at a cost that depends on the
    number of lengths and not on that of sequences. For packing over histograms: Krell et al., arXiv 2107.02027.
    """
    for length in range(len(histogram) - 1, 0, -1):
        left = int(histogram[length])
        while left and (found := rows.take(length, left)) is not None:
            lengths, count = found
            rows.put((*lengths, length), count)
            left -= count
        # A new row is the best fit for the next sequence of the same length, as long as it has room.
        a_row = min(rows.max_length // length, rows.max_sequences)
        if whole := left // a_row:
            rows.put((length,) * a_row, whole)
        if rest := left % a_row:
            rows.put((length,) * rest, 1)


def as_arrays(rows: Iterable[tuple[Lengths, int]], max_sequences: int) -> tuple[Patterns, NDArray[np.int64]]:
    """Return patterns of a fixed width, filled up with 0, and their counts, in an order of their own."""
    ordered = sorted((tuple(sorted(lengths)), count) for lengths, count in rows)
    patterns = np.zeros((len(ordered), max_sequences), dtype=np.int32)
    counts = np.zeros(len(ordered), dtype=np.int64)
    for place, (lengths, count) in enumerate(ordered):
        patterns[place, : len(lengths)] = lengths
        counts[place] = count
    return patterns, counts
