"""Time to train as MLPerf scores it: the mean of several runs without the fastest and the slowest."""

import math
from collections.abc import Sequence
from statistics import fmean

REQUIRED_RUNS = {
    "resnet": 5, "ssd": 5, "maskrcnn": 5, "dlrm": 5, "bert": 10, "rnnt": 10, "minigo": 10, "unet3d": 40,
}  # fmt: skip
"""Runs of a result (training_policies, training_rules.adoc of v2.0)."""


def left_out(benchmark: str | None) -> int:
    """Return how many runs at each end don't count; one that did not converge is among the slowest."""
    return 4 if benchmark == "unet3d" else 1


def olympic_mean(benchmark: str | None, values: Sequence[float | None]) -> float | None:
    """Return the mean of runs' values without the ends; None is a run that did not converge.

    None is returned where more runs did not converge than are left out, or where nothing is left between the ends.
    """
    drop = left_out(benchmark)
    ordered = sorted(math.inf if value is None else value for value in values)
    kept = ordered[drop : len(ordered) - drop]
    return fmean(kept) if kept and math.isfinite(kept[-1]) else None
