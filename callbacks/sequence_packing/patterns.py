"""Patterns: the multisets of lengths that fill a row exactly, which a mixture of rows is made of."""

from math import comb

import numpy as np
from numpy.typing import NDArray

Patterns = NDArray[np.int32]
"""(patterns, sequences a row): lengths in ascending order, 0 where a row has fewer sequences."""


def exact_patterns(max_length: int, max_sequences: int) -> Patterns:
    """Return every multiset of at most `max_sequences` lengths that add up to `max_length`.

    For 512 and 3 these are 22,102. Their number grows with the power `max_sequences - 1` of the length.
    """
    partial = np.zeros((1, 0), dtype=np.int32)
    for left in range(max_sequences, 1, -1):
        # The next length is at least the one before it, and leaves at least as much for each that follows.
        least = partial[:, -1] if partial.shape[1] else np.zeros(1, dtype=np.int32)
        most = (max_length - partial.sum(axis=1)) // left
        repeats = np.maximum(most - least + 1, 0)
        starts = np.repeat(np.cumsum(repeats) - repeats, repeats)
        following = np.arange(len(starts), dtype=np.int32) - starts + np.repeat(least, repeats)
        partial = np.column_stack([np.repeat(partial, repeats, axis=0), following.astype(np.int32)])
    last = max_length - partial.sum(axis=1, dtype=np.int32)
    return np.column_stack([partial, last]).astype(np.int32)


def count_of_patterns(max_length: int, max_sequences: int) -> int:
    """Return about how many `exact_patterns` there are, without making them."""
    orders = 1
    for factor in range(2, max_sequences + 1):
        orders *= factor
    return comb(max_length + max_sequences - 1, max_sequences - 1) // orders + 1
