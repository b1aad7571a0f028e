"""A target whose score arrives late: `StopAtTarget` does not miss it, and counts from the step that was scored."""

from collections.abc import Callable, Mapping

import lightning.pytorch as pl

from fasttrain.callbacks.scored_elsewhere.evaluation import Tag
from fasttrain.errors import ConfigError
from fasttrain.target import StopAtTarget
from fasttrain.trainer import stop_now


class LateTarget:
    """Gives late scores to one `StopAtTarget` during a fit.

    Args:
        target: what is to be told.
        is_late: whether the evaluation that is ending is scored elsewhere.
    """

    def __init__(self, target: StopAtTarget, is_late: Callable[[], bool]) -> None:
        self.target = target
        self._moments: dict[Tag, dict[str, float]] = {}
        self._before, target.score_comes_later = target.score_comes_later, is_late

    def expect(self, trainer: pl.Trainer, tag: Tag, moment: Mapping[str, float] | None = None) -> None:
        """Note the moment of an evaluation, that of now unless told otherwise."""
        self._moments[tag] = dict(self.target.moment() if moment is None else moment)

    def moment_of(self, tag: Tag) -> dict[str, float]:
        """Return what was noted."""
        return self._moments.get(tag, {})

    def judge(self, trainer: pl.Trainer, tag: Tag, scores: Mapping[str, float]) -> None:
        """Hand over a score that has arrived, and stop the run where it is good enough.

        The moment that counts is the evaluation's; when its score arrived is noted as `score_arrived_seconds`.

        Raises:
            ConfigError: the scores hold no value of the target's name.
        """
        moment, name = self._moments.pop(tag, {}), self.target.target.metric
        if name not in scores:
            if name in trainer.callback_metrics:  # the module logs that one itself
                return
            raise ConfigError(
                f"target.metric is '{name}', but the score function gives no such value; it gives: "
                f"{', '.join(sorted(scores))}."
            )
        if (now := self.target.moment().get("seconds")) is not None:
            moment["score_arrived_seconds"] = now
        self.target.judge(scores[name], tag.step, tag.epoch, moment)
        if self.target.is_to_stop:
            stop_now(trainer)

    def forget(self, tag: Tag) -> None:
        """The evaluation has no score."""
        self._moments.pop(tag, None)

    def release(self) -> None:
        """Leave the target as it was found."""
        self.target.score_comes_later = self._before
