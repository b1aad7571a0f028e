"""The obvious version: the process that trains evaluates too, all batches one after another, and waits for the score.

An evaluation rank runs the same validation steps with the same weights on the same batches, and the rows are scored in
the same order by the same function, so on equal devices the numbers are equal to the last bit.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

TOLERANCE = 0.0  # the same operations on the same bits, elsewhere


def reference(
    detect: Callable[[Any], NDArray[Any]],
    batches: Iterable[Any],
    score: Callable[[Any, NDArray[Any]], Mapping[str, float]],
    ground_truth: Any,
) -> dict[str, float]:
    """Return the scores of what a model finds in all batches of an evaluation."""
    rows = np.concatenate([detect(batch) for batch in batches])
    return {name: float(value) for name, value in score(ground_truth, rows).items()}
