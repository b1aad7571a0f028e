"""What is kept of a run's evaluations: in a checkpoint, and as a table of when each was made and known."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fasttrain.callbacks.scored_elsewhere.evaluation import Tag
from fasttrain.optimization import Table

COLUMNS = ("step", "epoch", "evaluated (s)", "score arrived (s)", "scoring (s)", "faults")


@dataclass
class Evaluation:
    """Where an evaluation's scores belong, and when things happened, in seconds of the run."""

    tag: Tag
    logging_step: int
    evaluated_seconds: float
    arrived_seconds: float = float("nan")
    scoring_seconds: float = float("nan")
    faults: int = 0

    def plain(self) -> dict[str, Any]:
        """Return it as numbers by name."""
        return asdict(self)

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> "Evaluation":
        """Return what `plain` was given of."""
        return cls(**{**values, "tag": Tag(**values["tag"])})


def table_of(evaluations: Sequence[Evaluation], stalled_seconds: float, lost: int) -> Table:
    """Return what was evaluated when, and when its score arrived."""
    rows = [
        (e.tag.step, e.tag.epoch, *(round(s, 3) for s in (e.evaluated_seconds, e.arrived_seconds,
         e.scoring_seconds)), e.faults)
        for e in evaluations
    ]  # fmt: skip
    note = f"training stood still for {stalled_seconds:.3f} s in all"
    if lost:
        note += f"; {lost} of {len(rows)} evaluations could not be scored"
    return Table("evaluations and their scores", COLUMNS, rows, note)


def plain_rows(rows: NDArray[Any]) -> dict[str, Any]:
    """Return rows, those with fields too, as what a checkpoint can hold."""
    flat = np.ascontiguousarray(rows).reshape(-1)
    return {
        "bytes": torch.from_numpy(flat.view(np.uint8)),
        "dtype": np.lib.format.dtype_to_descr(rows.dtype),
        "shape": list(rows.shape),
    }


def rows_of(plain: dict[str, Any]) -> NDArray[Any]:
    """Return the rows again."""
    dtype = np.lib.format.descr_to_dtype(plain["dtype"])
    flat: NDArray[Any] = plain["bytes"].numpy().view(dtype)
    return flat.reshape(plain["shape"])
