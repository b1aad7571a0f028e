"""What callbacks whose scores come late do with a Trainer's metrics and its other callbacks."""

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from fasttrain.callbacks.scored_elsewhere.evaluation import Tag
from fasttrain.callbacks.scored_elsewhere.late_checkpoint import LateCheckpoint
from fasttrain.callbacks.scored_elsewhere.late_target import LateTarget
from fasttrain.target import StopAtTarget

Watcher = LateTarget | LateCheckpoint
Scores = Sequence[tuple[Tag, dict[str, float]]]


def watchers_of(trainer: pl.Trainer, ending: Callable[[], Tag | None], is_first: bool) -> list[Watcher]:
    """Return who tells targets and monitoring checkpoints of late scores.

    Args:
        trainer: with its callbacks.
        ending: gives the evaluation whose validation hooks are being called, None outside of them.
        is_first: whether this process is the one that writes.
    """
    watchers: list[Watcher] = []
    for callback in vars(trainer)["callbacks"]:
        if isinstance(callback, StopAtTarget):
            watchers.append(LateTarget(callback, lambda: ending() is not None))
        elif isinstance(callback, ModelCheckpoint) and callback.monitor is not None:
            watchers.append(LateCheckpoint(callback, ending, is_first))
    return watchers


def forget_scores(trainer: pl.Trainer, scores: Scores) -> None:
    """Take the names that an earlier fit scored out of the Trainer's metrics, where they would pass for new ones."""
    for name in {name for _, values in scores for name in values}:
        trainer.callback_metrics.pop(name, None)


def show_last_scores(trainer: pl.Trainer, scores: Scores) -> None:
    """Put the last scores where a plain validation leaves its own when a fit has ended."""
    if scores:
        last: dict[str, Any] = scores[-1][1]
        late = {name: torch.tensor(value, dtype=torch.float64) for name, value in last.items()}
        trainer.callback_metrics.update(late)
