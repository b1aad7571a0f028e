"""Public numbers, kept in the tables beside this file: results that were submitted, and the reference's convergence."""

import csv
from bisect import bisect_left
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fasttrain.errors import ConfigError

FOLDER = Path(__file__).parent
REFERENCE_POINTS_SOURCE = "mlperf-logging 4.1.68, mlperf_logging/rcp_checker/training_2.0.0/rcps_{}.json"


@dataclass(frozen=True)
class Anchor:
    """A result of MLPerf Training; its minutes were computed from its logs, run_start to run_stop."""

    round: str
    benchmark: str
    submitter: str
    gpus: int
    accelerator: str
    minutes: float
    """Mean without the ends, times the factor that the convergence check asked for, as MLPerf publishes it."""
    to_converge: float
    unit: str
    global_batch: int
    samples_per_second_per_gpu: float | None
    """Of training alone, where the logs tell."""
    source: str
    """The folder of its logs, as a URL."""

    @property
    def place(self) -> str:
        """The folder in its round's repository."""
        return self.source.split("/", 7)[-1]


@dataclass(frozen=True)
class ReferencePoint:
    """How long the reference takes to converge at a global batch."""

    benchmark: str
    global_batch: int
    runs: int
    mean: float
    """Epochs, or samples for BERT; without the fastest and the slowest run."""
    least: float
    """A submission's mean below this is not plausible."""
    unit: str

    @property
    def source(self) -> str:
        """Where it is from."""
        return REFERENCE_POINTS_SOURCE.format(self.benchmark)


@cache
def anchors(benchmark: str) -> tuple[Anchor, ...]:
    """Return the public results of a benchmark, most GPUs first."""
    return tuple(
        Anchor(
            row["round"], row["benchmark"], row["submitter"], int(row["gpus"]), row["accelerator"],
            float(row["published_minutes"]), float(row["to_converge"]), row["unit"], int(row["global_batch"]),
            float(row["samples_per_second_per_gpu"]) if row["samples_per_second_per_gpu"] else None, row["source"],
        )
        for row in _rows("anchors.csv") if row["benchmark"] == benchmark
    )  # fmt: skip


def shown_anchors(benchmark: str) -> list[Anchor]:
    """Return some of them, fastest first: NVIDIA's own, and each accelerator's fastest of 8 and of fewer or more GPUs.

    A result that a later round carried over counts once.
    """
    every = {(a.submitter, a.accelerator, a.gpus, a.minutes): a for a in reversed(anchors(benchmark))}
    kept: dict[Any, Anchor] = {}
    for anchor in sorted(every.values(), key=lambda a: (a.minutes, a.round)):
        if anchor.submitter == "NVIDIA":
            kept[anchor] = anchor
        kept.setdefault((anchor.accelerator, anchor.gpus == 8), anchor)
    return sorted(set(kept.values()), key=lambda a: (a.minutes, a.round))


@cache
def reference_points(benchmark: str) -> tuple[ReferencePoint, ...]:
    """Return the reference's points of a benchmark (rules 2.0.0) by global batch; empty where there are none."""
    points = [
        ReferencePoint(
            row["benchmark"], int(row["global_batch"]), int(row["runs"]), float(row["mean"]), float(row["least"]),
            row["unit"],
        )
        for row in _rows("reference_points.csv") if row["benchmark"] == benchmark
    ]  # fmt: skip
    return tuple(sorted(points, key=lambda point: point.global_batch))


def expected_to_converge(benchmark: str, global_batch: int) -> tuple[float, str]:
    """Return the reference's epochs, or samples, at a global batch, and in words how they were found.

    Between two points they are interpolated, as MLPerf's checker does; below the smallest, its number is taken.

    Raises:
        ConfigError: the benchmark has no points, or the batch is beyond the largest: nobody knows.
    """
    points = reference_points(benchmark)
    if not points:
        with_points = sorted({row["benchmark"] for row in _rows("reference_points.csv")})
        raise ConfigError(
            f"there are no reference convergence points of '{benchmark}', but of {', '.join(with_points)}; say by "
            "--epochs after how much training the target is reached."
        )
    batches = [point.global_batch for point in points]
    if global_batch > batches[-1]:
        raise ConfigError(
            f"the reference of {benchmark} was run with global batches up to {batches[-1]:,}, not with "
            f"{global_batch:,}; take fewer GPUs or a smaller batch, or say by --epochs after how much training the "
            "target is reached."
        )
    index = bisect_left(batches, global_batch)
    high = points[index]
    if high.global_batch == global_batch:
        return high.mean, f"the reference's mean of {high.runs} runs at {global_batch:,}"
    if index == 0:
        return high.mean, f"the reference's mean at {high.global_batch:,}, its smallest"
    low = points[index - 1]
    share = (global_batch - low.global_batch) / (high.global_batch - low.global_batch)
    between = f"between the reference's means at {low.global_batch:,} and {high.global_batch:,}"
    return low.mean + share * (high.mean - low.mean), between


@cache
def _rows(name: str) -> tuple[dict[str, str], ...]:
    with (FOLDER / name).open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))
