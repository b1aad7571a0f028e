"""The obvious version: training waits until the score is there.

The scoring process calls the same function with the same bytes, so its numbers are equal to the last bit.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

TOLERANCE = 0.0  # the same function, the same float64 rows, another process


def reference(
    score: Callable[[Any, NDArray[Any]], Mapping[str, float]], ground_truth: Any, rows: Sequence[NDArray[Any]]
) -> dict[str, float]:
    """Return the scores of an evaluation's rows, joined along the first dimension."""
    return {name: float(value) for name, value in score(ground_truth, np.concatenate(rows)).items()}
