"""`LateScoring`: what callbacks do alike whose scores arrive while training goes on."""

import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping

from fasttrain.callback_door import ActingCallback
from fasttrain.callbacks.scored_elsewhere.evaluation import Scored, Tag
from fasttrain.callbacks.scored_elsewhere.late_scores import Watcher, forget_scores, show_last_scores, watchers_of
from fasttrain.errors import OptimizationError


class LateScoring(ActingCallback):
    """Has the fit's clock, the scores that have arrived, and those who are to be told of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[tuple[Tag, dict[str, float]]] = []
        """Those that have arrived, in order."""
        self._watchers: list[Watcher] = []
        self._ending: Tag | None = None  # of the evaluation whose validation hooks are being called
        self._begun, self._seconds_before = time.perf_counter(), 0.0

    @property
    def seconds(self) -> float:
        """Wall seconds since the fit began, those before a resume included."""
        return self._seconds_before + time.perf_counter() - self._begun

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """The evaluation before is over for everybody."""
        self._ending = None

    def _begin(self) -> None:
        """Start the clock of a fit."""
        self._begun = time.perf_counter()

    def _watch(self, trainer: pl.Trainer, is_first: bool) -> None:
        """Stand before the Trainer's targets and checkpoints until `_stop_watching`."""
        forget_scores(trainer, self.scores)
        self._watchers += watchers_of(trainer, lambda: self._ending, is_first)

    def _stop_watching(self) -> None:
        for watcher in self._watchers:
            watcher.release()
        self._watchers.clear()
        self._ending = None

    def _expect(self, trainer: pl.Trainer, tag: Tag) -> None:
        """Say that an evaluation ends now whose scores come later."""
        for watcher in self._watchers:
            watcher.expect(trainer, tag)
        self._ending = tag

    def _refuse_the_impatient(self, trainer: pl.Trainer, room: str, why: str) -> None:
        """Refuse an EarlyStopping that monitors a score which is late.

        Args:
            why: what is the matter with that score, behind its name.

        Raises:
            OptimizationError: there is one.
        """
        if self._ending is None:
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, EarlyStopping) and callback.monitor not in trainer.callback_metrics:
                raise OptimizationError(
                    f"{room}: EarlyStopping monitors '{callback.monitor}', which {why}; stop at a target instead "
                    "(fasttrain.target.StopAtTarget), or leave one out."
                )

    def _log(
        self, trainer: pl.Trainer, scored: Scored, step: int, evaluated_seconds: float, arrived_seconds: float
    ) -> None:
        """Keep scores, and log them under the step that was evaluated; seconds since the fit began."""
        times = {"evaluated_seconds": evaluated_seconds, "score_arrived_seconds": arrived_seconds}
        for logger in trainer.loggers:
            logger.log_metrics({**scored.scores, **times, "epoch": scored.tag.epoch}, step)
            logger.save()
        self.scores.append((scored.tag, scored.scores))

    def _tell(self, trainer: pl.Trainer, scored: Scored) -> None:
        """Have targets and checkpoints judge scores that are logged."""
        for watcher in self._watchers:
            watcher.judge(trainer, scored.tag, scored.scores)

    def _show_last(self, trainer: pl.Trainer) -> None:
        show_last_scores(trainer, self.scores)
