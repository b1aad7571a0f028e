"""Non-negative least squares for matrices whose columns count lengths in patterns.

A column has at most as many entries as a row has sequences, so the gradient is a lookup, and the only dense system is
that of the columns in use. scipy's solver takes any matrix; some of its versions make the square of all columns, which
for the 22,102 patterns of length 512 are 3.9 GB.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasttrain.callbacks.sequence_packing.patterns import Patterns

Vector = NDArray[np.floating[Any]]


def mixture_of(patterns: Patterns, wanted: Vector, weights: Vector, max_columns: int | None = None) -> Vector:
    """Return how many rows of each pattern come nearest to a histogram: x >= 0 that minimizes |weights (A x - wanted)|.

    Args:
        patterns: (patterns, sequences a row); A counts each length in each of them.
        wanted: (max_length + 1,) number of sequences by length; entry 0 is not looked at.
        weights: (max_length + 1,) of each length's error.
        max_columns: stop after so many patterns have come in; None is three times the number of lengths.

    The method is Lawson and Hanson's active set ("Solving Least Squares Problems", 1974, chapter 23).
    """
    size = len(wanted)
    scale = weights.copy()
    scale[0] = 0.0  # padding is wanted by nobody
    target = scale * wanted
    solution = np.zeros(len(patterns))
    columns = _Columns(size)
    in_use: list[int] = []
    tolerance = 1e-10 * max(1.0, float(np.abs(_transposed(patterns, scale * target)).max(initial=0.0)))
    for _ in range(max_columns or 3 * size):
        residual = target - columns.product(solution[in_use])
        gradient = _transposed(patterns, scale * residual)
        gradient[in_use] = -np.inf
        entering = int(np.argmax(gradient))
        if gradient[entering] <= tolerance:
            break
        in_use.append(entering)
        columns.add(patterns[entering], scale)
        while True:
            found = columns.solve(target)
            if found.min() > 0:
                break
            current = solution[in_use]
            falling = found <= 0
            # The step to the boundary: the first pattern whose count reaches 0 leaves.
            ratio = current[falling] / np.maximum(current[falling] - found[falling], 1e-300)
            step = float(ratio.min())
            moved = current + step * (found - current)
            leaving = falling & (moved <= 1e-12 * max(1.0, float(np.abs(moved).max())))
            leaving[np.flatnonzero(falling)[int(np.argmin(ratio))]] = True
            solution[in_use] = np.where(leaving, 0.0, moved)
            columns.keep(~leaving)
            in_use = [column for column, leaves in zip(in_use, leaving, strict=True) if not leaves]
            if not in_use:
                break
        if in_use:
            solution[in_use] = found
    return solution


def _transposed(patterns: Patterns, by_length: Vector) -> Vector:
    """Return A^T times a vector over lengths, whose entry 0 is 0."""
    total = by_length[patterns[:, 0]]
    for place in range(1, patterns.shape[1]):
        total = total + by_length[patterns[:, place]]
    return total


class _Columns:
    """The weighted columns in use and their normal matrix, kept up to date as columns come and go."""

    def __init__(self, size: int) -> None:
        self.values = np.zeros((0, size))
        self.normal = np.zeros((0, 0))

    def add(self, pattern: NDArray[np.int32], scale: Vector) -> None:
        column = np.bincount(pattern, minlength=len(scale)) * scale
        products = self.values @ column
        self.values = np.vstack([self.values, column])
        self.normal = np.block([[self.normal, products[:, None]], [products[None], np.array([[column @ column]])]])

    def keep(self, which: NDArray[np.bool_]) -> None:
        self.values = self.values[which]
        self.normal = self.normal[np.ix_(which, which)]

    def product(self, counts: Vector) -> Vector:
        return counts @ self.values

    def solve(self, target: Vector) -> Vector:
        try:
            solved: Vector = np.linalg.solve(self.normal, self.values @ target)
        except np.linalg.LinAlgError:  # columns that depend on each other
            solved = np.linalg.lstsq(self.values.T, target, rcond=None)[0]
        return solved
