"""A target whose score arrives late: `StopAtTarget` does not miss it, and counts from the step that was scored."""

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl

from fasttrain.callbacks.async_scoring.evaluation import Tag
from fasttrain.errors import ConfigError
from fasttrain.target import StopAtTarget
from fasttrain.trainer import stop_now


class LateTarget:
    """Stands before one `StopAtTarget` during a fit.

    Args:
        target: what is to be told.
        is_late: whether the evaluation that is ending is scored elsewhere.
    """

    def __init__(self, target: StopAtTarget, is_late: Callable[[], bool]) -> None:
        self.target, self.is_late = target, is_late
        self._moments: dict[Tag, dict[str, float]] = {}
        at_once = target.on_validation_end

        def on_validation_end(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            if not self.is_late() or target.target.metric in trainer.callback_metrics:
                at_once(trainer, pl_module)

        target.on_validation_end = on_validation_end  # type: ignore[method-assign]

    def expect(self, trainer: pl.Trainer, tag: Tag, moment: Mapping[str, float] | None = None) -> None:
        """Note the moment of an evaluation, that of now unless told otherwise."""
        self._moments[tag] = dict(self.target.moment() if moment is None else moment)

    def moment_of(self, tag: Tag) -> dict[str, float]:
        """Return what was noted."""
        return self._moments.get(tag, {})

    def judge(self, trainer: pl.Trainer, tag: Tag, scores: Mapping[str, float]) -> None:
        """Take a score that has arrived, and stop the run where it is good enough.

        The moment that counts is the evaluation's; when its score arrived is noted as `score_arrived_seconds`.

        Raises:
            ConfigError: the scores hold no value of the target's name.
        """
        moment, target = self._moments.pop(tag, {}), self.target
        score = scores.get(target.target.metric)
        if score is None:
            if target.target.metric in trainer.callback_metrics:  # the module logs that one itself
                return
            raise ConfigError(
                f"target.metric is '{target.target.metric}', but the score function gives no such value; it gives: "
                f"{', '.join(sorted(scores))}."
            )
        target.scores.append((tag.step, score))
        if target.reached_at is None and target.is_reached_by(score):
            now: Any = target.moment().get("seconds")
            arrived = {} if now is None else {"score_arrived_seconds": now}
            target.reached_at = {"step": tag.step, "epoch": tag.epoch, **moment, **arrived}
        if target.reached_at is not None and target.target.stop:
            stop_now(trainer)

    def forget(self, tag: Tag) -> None:
        """The evaluation has no score."""
        self._moments.pop(tag, None)

    def release(self) -> None:
        """Leave the target as it was found."""
        del self.target.on_validation_end
