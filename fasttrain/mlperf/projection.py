"""How long a benchmark would take on so many GPUs: an estimate from a measured rate and the reference's convergence.

    training = epochs to target x steps an epoch x global batch / (GPUs x rate x efficiency)

Steps are whole, so the waste of an epoch's last step is in it. Evaluations add the inference, spread over all GPUs, and
where scoring isn't hidden behind training, the scoring. Start-up before the first batch is not on MLPerf's clock; what
the first steps need for compiling, capturing and filling the loaders is.
"""

import csv
import math
from dataclasses import dataclass
from pathlib import Path

from fasttrain.batch_plan import BatchPlan
from fasttrain.errors import ConfigError, DataError, nearest
from fasttrain.mlperf.public import anchors, expected_to_converge
from fasttrain.report import format_number

BERT_EVALUATION_STEP = 25_000


@dataclass(frozen=True)
class Work:
    """A benchmark's data and when it is evaluated (training_policies, training_rules.adoc of v2.0)."""

    train: int | None
    """Samples of an epoch; None where progress is counted in samples."""
    val: int
    epochs_between: float = 1.0
    """Epochs between evaluations."""


WORK = {
    "ssd": Work(1_170_301, 24_781),  # OpenImages-MLPerf, NVIDIA's README in training_results_v2.0
    "resnet": Work(1_281_167, 50_000, 4.0),  # ImageNet-1k
    "bert": Work(None, 10_000),
}


@dataclass(frozen=True)
class Assumptions:
    """What an estimate rests on, besides the reference's convergence."""

    gpus: int
    batch: int
    """Samples a step and GPU."""
    rate: float
    """Training samples a second and GPU, measured on one."""
    efficiency: float
    """Share of that rate which is left with all GPUs; 1 where `rate` was measured with them."""
    evaluation_rate: float | None = None
    """Samples a second and GPU in evaluation; None takes the training rate, though inference is quicker."""
    scoring_seconds: float = 0.0
    """Of the host after each evaluation's inference, COCO's numbers for instance."""
    scoring_hidden: bool = True
    """Whether training goes on while it scores; then the last one alone is waited for."""
    first_steps_seconds: float = 60.0
    """Compiling, capturing, filling loaders after the clock has started."""
    epochs: float | None = None
    """To the target, or samples for BERT; None is the reference's."""

    def __post_init__(self) -> None:
        for name in ("gpus", "batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("rate", "evaluation_rate", "epochs"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value:g}; it must be above 0.")
        if not 0 < self.efficiency <= 1:
            raise ConfigError(f"efficiency is {self.efficiency:g}; a share above 0 and up to 1 is needed.")
        if self.scoring_seconds < 0 or self.first_steps_seconds < 0:
            raise ConfigError("scoring and first steps take 0 seconds or more.")

    @property
    def global_batch(self) -> int:
        """Samples a step over all GPUs."""
        return self.gpus * self.batch


@dataclass(frozen=True)
class Estimate:
    """An estimated time to train, in seconds by part."""

    benchmark: str
    epochs: float
    """To the target, or samples where the benchmark counts those."""
    why_epochs: str
    evaluations: int
    training: float
    evaluation: float
    scoring: float
    first_steps: float

    @property
    def seconds(self) -> float:
        """From run_start to run_stop."""
        return self.training + self.evaluation + self.scoring + self.first_steps


def estimate(benchmark: str, given: Assumptions) -> Estimate:
    """Return the estimated time to train.

    Raises:
        ConfigError: nothing is known about the benchmark, or about its convergence at this global batch.
    """
    if benchmark not in WORK:
        raise ConfigError(f"the work of '{benchmark}' is not known here; {nearest(benchmark, WORK)}")
    work = WORK[benchmark]
    if given.epochs is None:
        epochs, why = expected_to_converge(benchmark, given.global_batch)
    else:
        epochs, why = given.epochs, "as given"
    if work.train is not None:
        samples = epochs * BatchPlan(work.train, given.gpus, given.batch).steps * given.global_batch
        evaluations = math.ceil(epochs / work.epochs_between)
    else:
        samples = epochs
        evaluations = math.ceil(samples / bert_interval(given.global_batch))
    rate = given.gpus * given.rate * given.efficiency
    inference = given.gpus * (given.evaluation_rate or given.rate) * given.efficiency
    return Estimate(
        benchmark,
        epochs,
        why,
        evaluations,
        training=samples / rate,
        evaluation=evaluations * work.val / inference,
        scoring=given.scoring_seconds * (1 if given.scoring_hidden else evaluations),
        first_steps=given.first_steps_seconds,
    )


def bert_interval(global_batch: int) -> int:
    """Return the samples between two of BERT's evaluations (training_policies, training_rules.adoc of v2.0)."""
    return int(0.05 * (230.23 * global_batch + 3_000_000) / BERT_EVALUATION_STEP) * BERT_EVALUATION_STEP


def estimate_lines(found: Estimate, given: Assumptions) -> list[str]:
    """Return the estimate, its assumptions and public results on as many GPUs, as lines to print."""
    gpus = f"{given.gpus:,} GPU" + ("s" if given.gpus > 1 else "")
    unit = "samples" if WORK[found.benchmark].train is None else "epochs"
    parts = (("training", found.training), ("evaluation", found.evaluation), ("scoring", found.scoring),
             ("first steps", found.first_steps), ("time to train", found.seconds))  # fmt: skip
    inference = given.evaluation_rate or given.rate
    hidden = "hidden, the last one waited for" if given.scoring_hidden else "training waits for it"
    whose = "" if given.evaluation_rate else ", taken to be training's"
    lines = [
        f"ESTIMATE, not a measurement: {found.benchmark} on {gpus}, global batch {given.global_batch:,}",
        *(f"{name:>16}{seconds / 60:>12.2f} min{seconds / found.seconds:>8.1%}" for name, seconds in parts),
        "assumed:",
        f"  convergence   {format_number(found.epochs, 4)} {unit}, {found.why_epochs}",
        f"  throughput    {format_number(given.rate, 4)} samples/s a GPU, of which {given.efficiency:.0%} are left",
        f"  evaluations   {found.evaluations}, at {format_number(inference, 4)} samples/s a GPU{whose}",
        f"  scoring       {given.scoring_seconds:g} s an evaluation, {hidden}",
        f"  first steps   {given.first_steps_seconds:g} s on the clock for compiling, capturing and filling loaders",
        "  start-up      before the clock starts, so not in it",
    ]
    same = sorted((a for a in anchors(found.benchmark) if a.gpus == given.gpus), key=lambda a: a.minutes)
    if same:
        lines.append(f"public results on {gpus} (mean without the fastest and the slowest run):")
        best = {a.accelerator: a for a in reversed(same)}  # the fastest of each accelerator
        for a in sorted(best.values(), key=lambda a: a.minutes):
            who = f"{a.accelerator}, {a.submitter} v{a.round}, global batch {a.global_batch:,}"
            lines.append(f"{a.minutes:>12.2f} min  {who}: {a.source}")
    return lines


def rate_from_rows(file: Path, case: str, variant: str) -> float:
    """Return the samples a second of the last row of a case and variant.

    Raises:
        DataError: the file can't be read as rows.
        ConfigError: there is no such row; those that are there are named.
    """
    try:
        with file.open(newline="", encoding="utf-8") as opened:
            rows = [row for row in csv.DictReader(opened) if str(row["metric"]).endswith("_per_second")]
    except (OSError, KeyError, ValueError) as error:
        raise DataError(f"{file} can't be read as result rows ({type(error).__name__}: {error}).") from None
    found = [row for row in rows if (row["case"], row["variant"]) == (case, variant)]
    if not found:
        there = ", ".join(sorted({f"{row['case']}/{row['variant']}" for row in rows})) or "no rates"
        raise ConfigError(f"{file} has no rate of case '{case}', variant '{variant}'; it has: {there}.")
    return float(found[-1]["value"])
