"""Stop anywhere, go on as if never stopped: when the run's state is written, and what Lightning's own leaves out."""

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint

from fasttrain.checkpoints import LAST
from fasttrain.config import CheckpointConfig
from fasttrain.errors import DataError
from fasttrain.randomness import random_state, set_random_state
from fasttrain.trainer import (
    epoch_is_complete,
    fit_is_ending,
    is_accumulating,
    is_between_batches,
    load_pending_loader_state,
    logging_interval,
    stop_now,
    validation_is_due,
)

RANDOM_STATE = "fasttrain_random_state"


class ResumePoint(Checkpoint):
    """Keeps `last.ckpt`, from which the run goes on bit for bit where the kernels are deterministic.

    It is written at the configured intervals, at the last step, when `interrupt()` was called, and when the next batch
    can't be fetched, so that a broken image costs nothing that was computed before it. Lightning can continue exactly
    from two places only: after a batch that no validation follows, and after a whole epoch with its validation. So a
    stop that is asked for when a validation is due waits for it to end, and one in the middle of accumulating
    gradients for the optimizer step.

    Beside Lightning's state the file holds the global random state, which evaluation is kept from changing.
    """

    def __init__(self, folder: Path, config: CheckpointConfig) -> None:
        self.path = folder / LAST
        self.config = config
        self.interrupted = False
        self.saved_at_step: int | None = None
        self._interrupt_wanted = False
        self._last_saved = time.monotonic()
        self._restore: dict[str, Any] | None = None
        self._before_evaluation: dict[str, Any] | None = None

    def interrupt(self) -> None:
        """Ask for a checkpoint and the end of the run at the next place where both are exact."""
        self._interrupt_wanted = True

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put back the random state before the first loader is made."""
        if self._restore is not None:
            set_random_state(self._restore)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """See that the training loader goes on where it was."""
        load_pending_loader_state(trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """In the middle of an epoch, put it back once more: making the loader may have drawn from it."""
        if self._restore is not None:
            if batch_idx > 0:
                set_random_state(self._restore)
            self._restore = None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if it is time, and stop if that was asked for."""
        last_step = 0 <= trainer.max_steps <= trainer.global_step
        # A checkpoint holds no gradients, so a window of accumulation has to end first.
        if is_accumulating(trainer) or (validation_is_due(trainer) and not last_step):
            return
        due = trainer.world_size == 1 or trainer.global_step % logging_interval(trainer) == 0
        if due and self._is_interrupted(trainer):
            self._save(trainer)
            self._stop(trainer)
        elif last_step or trainer.should_stop or self._is_time(trainer):
            self._save(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remember the random state."""
        self._before_evaluation = random_state()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put it back: training must not depend on whether or when it is evaluated."""
        if self._before_evaluation is not None:
            set_random_state(self._before_evaluation)
            self._before_evaluation = None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save after a whole epoch; Lightning also comes here when it stops in the middle of one."""
        if not epoch_is_complete(trainer):
            return
        epochs = self.config.every_n_epochs
        interrupted = self._is_interrupted(trainer)
        if (
            interrupted
            or fit_is_ending(trainer)
            or (epochs and (trainer.current_epoch + 1) % epochs == 0)
            or trainer.strategy.reduce_boolean_decision(self._minutes_are_over(), all=False)
        ):
            self._save(trainer)
        if interrupted:
            self._stop(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Save if it was the fetching of a batch that failed: the state is then that of a whole number of steps."""
        fetching_failed = isinstance(exception, Exception) and is_between_batches(trainer)
        if fetching_failed and trainer.world_size == 1 and self.saved_at_step != trainer.global_step:
            self._save(trainer)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the random state to every checkpoint."""
        checkpoint[RANDOM_STATE] = self._before_evaluation or random_state()

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take it out, to be put back when training begins."""
        self._restore = checkpoint.get(RANDOM_STATE)

    def _is_interrupted(self, trainer: pl.Trainer) -> bool:
        """Whether any rank was asked to stop. A signal reaches them at different steps, and they must stop together."""
        if trainer.world_size == 1:
            return self._interrupt_wanted
        return bool(trainer.strategy.reduce_boolean_decision(self._interrupt_wanted, all=False))

    def _stop(self, trainer: pl.Trainer) -> None:
        self.interrupted = True
        stop_now(trainer)

    def _is_time(self, trainer: pl.Trainer) -> bool:
        steps = self.config.every_n_steps
        if steps and trainer.global_step % steps == 0 and trainer.global_step != self.saved_at_step:
            return True
        # Ranks' clocks differ, and all of them must save together: several agree at the end of an epoch only.
        return trainer.world_size == 1 and self._minutes_are_over()

    def _minutes_are_over(self) -> bool:
        minutes = self.config.every_n_minutes
        return minutes is not None and time.monotonic() - self._last_saved >= minutes * 60

    def _save(self, trainer: pl.Trainer) -> None:
        try:
            trainer.save_checkpoint(self.path)
        except OSError as error:
            raise DataError(
                f"the checkpoint {self.path} can't be written ({error.strerror or error}); the one written before it "
                "is kept: make room or choose another --run-dir, then go on with --resume."
            ) from error
        self.saved_at_step = trainer.global_step
        self._last_saved = time.monotonic()
