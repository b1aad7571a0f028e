"""What a global batch wastes of an epoch, and which ones near it waste less.

An epoch of N samples in steps of B takes ceil(N / B) of them. The last step is padded or repeats samples, so the epoch
does the work of ceil(N / B) B samples: the waste is (ceil(N / B) B - N) / N. NVIDIA's ResNet-50 of MLPerf Training v2.0
ran on 527 nodes of 8 GPUs for that: 67,456 of 1,281,167 images a step waste 0.039 %, where 512 nodes waste 2.31 %.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fasttrain.errors import ConfigError

NEAR = 0.05  # how far from the wanted global batch proposals lie, as a share of it


def evaluation_is_due(epoch: int, every: int, offset: int, max_epochs: int | None) -> bool:
    """Whether a run is evaluated after an epoch, counted from 0: `epoch = offset (mod every)`, or the last one.

    MLPerf's ResNet-50 has every 4 and an offset of 0 to 3; NVIDIA's 2 is after the 3rd, 7th, 11th ... epoch.
    """
    return epoch % every == offset % every or epoch + 1 == max_epochs


@dataclass(frozen=True)
class BatchPlan:
    """An epoch in global batches."""

    samples: int
    """Of one epoch."""
    gpus: int
    batch: int
    """Samples a step and GPU."""

    def __post_init__(self) -> None:
        for name in ("samples", "gpus", "batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.global_batch > self.samples:
            raise ConfigError(
                f"{self.gpus} GPUs with {self.batch} samples each take {self.global_batch:,} a step, but the epoch has "
                f"only {self.samples:,}; take fewer."
            )

    @property
    def global_batch(self) -> int:
        """Samples a step."""
        return self.gpus * self.batch

    @property
    def steps(self) -> int:
        """Of one epoch."""
        return -(-self.samples // self.global_batch)

    @property
    def waste(self) -> float:
        """Work of an epoch beyond its samples, as a share of them."""
        return (self.steps * self.global_batch - self.samples) / self.samples

    def warmup_steps(self, epochs: float) -> int:
        """Return the steps of a warm-up of some epochs."""
        return round(epochs * self.steps)

    def evaluations(self, epochs: int, every: int, offset: int) -> list[tuple[int, int]]:
        """Return (epochs done, steps done) of each evaluation; see `evaluation_is_due`."""
        if every < 1 or epochs < 1:
            raise ConfigError(f"epochs is {epochs} and evaluations come every {every}; both must be at least 1.")
        due = [epoch + 1 for epoch in range(epochs) if evaluation_is_due(epoch, every, offset, epochs)]
        return [(done, done * self.steps) for done in due]


def proposals(
    wanted: BatchPlan, gpus_per_node: int | None = None, near: float = NEAR, count: int = 5
) -> list[BatchPlan]:
    """Return the plans near a wanted one that waste least, least first; of equal ones the nearest.

    Args:
        wanted: its samples are taken, and GPUs or batch are varied.
        gpus_per_node: vary the number of whole nodes as well; None keeps the GPUs.
        near: largest difference of the global batch, as a share of the wanted one.
        count: how many.

    Raises:
        ConfigError: the wanted GPUs are not whole nodes.
    """
    if gpus_per_node is not None and (gpus_per_node < 1 or wanted.gpus % gpus_per_node):
        raise ConfigError(
            f"{wanted.gpus} GPUs are not whole nodes of {gpus_per_node}; give a multiple, or leave --gpus-per-node out."
        )
    found = set(_candidates(wanted, gpus_per_node, near))
    return sorted(found, key=lambda plan: (plan.waste, abs(plan.global_batch - wanted.global_batch), plan.gpus))[:count]


def _candidates(wanted: BatchPlan, gpus_per_node: int | None, near: float) -> Iterator[BatchPlan]:
    low, high = wanted.global_batch * (1 - near), min(wanted.global_batch * (1 + near), wanted.samples)
    for batch in range(max(1, math.ceil(low / wanted.gpus)), int(high // wanted.gpus) + 1):
        yield BatchPlan(wanted.samples, wanted.gpus, batch)
    if gpus_per_node is not None:
        per_node = gpus_per_node * wanted.batch
        for nodes in range(max(1, math.ceil(low / per_node)), int(high // per_node) + 1):
            yield BatchPlan(wanted.samples, nodes * gpus_per_node, wanted.batch)


def plan_lines(
    wanted: BatchPlan, better: list[BatchPlan], epochs: int, every: int, offset: int, warmup_epochs: float
) -> list[str]:
    """Return the plan, its warm-up and evaluations, and the proposals, as lines to print."""
    due = wanted.evaluations(epochs, every, offset)
    shown = ", ".join(f"{done} ({steps:,})" for done, steps in due[:4]) + (" ..." if len(due) > 4 else "")
    return [
        _row("GPUs", "batch", "global batch", "steps", "waste"),
        _row(*_cells(wanted)),
        f"warm-up: {wanted.warmup_steps(warmup_epochs):,} steps in {warmup_epochs:g} epochs",
        f"evaluations: {len(due)} in {epochs} epochs, after epoch (step) {shown}",
        "near it, least waste first:" if better else "nothing near it",
        *(_row(*_cells(plan)) for plan in better),
    ]


def _cells(plan: BatchPlan) -> tuple[str, ...]:
    return f"{plan.gpus:,}", f"{plan.batch:,}", f"{plan.global_batch:,}", f"{plan.steps:,}", f"{plan.waste:.3%}"


def _row(*cells: str) -> str:
    return "".join(f"{cell:>14}" for cell in cells)
