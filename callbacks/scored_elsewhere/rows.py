"""What a LightningModule offers so that its evaluations can be scored elsewhere."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from fasttrain.callbacks.scored_elsewhere.process import ScoreFunction


@runtime_checkable
class KeepsRows(Protocol):
    """A module that keeps what its `validation_step` finds, and hands it out when the evaluation ends."""

    def validation_rows(self) -> Sequence[NDArray[Any]]:
        """Return what this evaluation found, arrays that are joined along the first dimension, and forget it."""
        ...

    def ground_truth(self) -> Any:
        """Return what rows are scored against; asked for once, before the first step, and pickled."""
        ...

    def score_function(self) -> ScoreFunction:
        """Return `score(ground_truth, rows) -> numbers by name`, in a form that another process can import."""
        ...


def why_not(module: object) -> str:
    """Return a sentence's worth of what a module lacks to be scored elsewhere."""
    wanted = ("validation_rows", "ground_truth", "score_function")
    lacking = [name for name in wanted if not callable(getattr(module, name, None))]
    return (
        f"{type(module).__name__} has no {' and no '.join(lacking)}; a module that is scored elsewhere hands out the "
        "rows that an evaluation found, what they are scored against, and how"
    )
