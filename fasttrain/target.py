"""Time to target: when the score was reached, after how many samples, and whether to stop there."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl

from fasttrain.config import TargetConfig
from fasttrain.errors import ConfigError


class StopAtTarget(pl.Callback):
    """Watches a logged score; notes where it first reaches the target, and stops the run there.

    The step noted is the one whose weights were scored.
    """

    def __init__(self, target: TargetConfig) -> None:
        self.target = target
        self.scores: list[tuple[int, float]] = []
        """(global step, score) of each evaluation."""
        self.reached_at: dict[str, float] | None = None
        self.moment: Callable[[], dict[str, float]] = dict
        """Returns what else to note of the moment when the target is reached: seconds, samples."""
        self.score_comes_later: Callable[[], bool] = lambda: False
        """Whether the evaluation that ends now is scored elsewhere. Who sets it calls `judge` when it has the score."""
        self.listeners: list[Callable[[float, int], None]] = []
        """Called with each score and its step once it was judged, on all ranks."""

    @property
    def best(self) -> float | None:
        """The best score so far; NaN only when there is no other."""
        numbers = [score for _, score in self.scores if not math.isnan(score)]
        if not numbers:
            return math.nan if self.scores else None
        return max(numbers) if self.target.mode == "max" else min(numbers)

    def is_reached_by(self, score: float) -> bool:
        """Whether a score is at least as good as the target. NaN is not."""
        return score >= self.target.value if self.target.mode == "max" else score <= self.target.value

    @property
    def is_to_stop(self) -> bool:
        """Whether the target is reached and the run is to end there."""
        return self.reached_at is not None and self.target.stop

    def judge(self, score: float, step: int, epoch: int, moment: Mapping[str, float] | None = None) -> None:
        """Note the score of the weights after `step`, and whether it reaches the target first.

        Args:
            score: equal on all ranks.
            step, epoch: of the evaluation, however late its score is.
            moment: of the evaluation; None is now.
        """
        self.scores.append((step, score))
        if self.reached_at is None and self.is_reached_by(score):
            self.reached_at = {"step": step, "epoch": epoch, **(self.moment() if moment is None else moment)}
        for listener in self.listeners:
            listener(score, step)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Judge the score of this evaluation.

        Raises:
            ConfigError: the module logs no score of that name.
        """
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        found = trainer.callback_metrics.get(self.target.metric)
        if found is None and self.score_comes_later():
            return
        if found is None:
            logged = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
            raise ConfigError(
                f"target.metric is '{self.target.metric}', but {type(pl_module).__name__} logs no such value in "
                f"validation; it logs: {logged}."
            )
        # Ranks differ where a module does not average its score over them; they must not differ about stopping.
        score = float(trainer.strategy.broadcast(float(found)))
        self.judge(score, trainer.global_step, trainer.current_epoch)
        if self.is_to_stop:
            trainer.should_stop = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop before the first step of a resumed run whose target was reached already."""
        if self.is_to_stop:
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        """Return the scores and where the target was reached."""
        return {"scores": [list(pair) for pair in self.scores], "reached_at": self.reached_at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from them."""
        self.scores = [(int(step), float(score)) for step, score in state_dict["scores"]]
        # Where the target was raised since, the old one's moment means nothing.
        still = self.best is not None and self.is_reached_by(self.best)
        self.reached_at = state_dict["reached_at"] if still else None
