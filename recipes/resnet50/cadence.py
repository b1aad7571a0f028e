"""When a run is evaluated: every few epochs, from an epoch of one's choice on, and at its end."""

import sys
from typing import Any

import lightning.pytorch as pl

from fasttrain.batch_plan import evaluation_is_due

NEVER = sys.maxsize


class EvaluationCadence(pl.Callback):
    """Evaluates every `trainer.check_val_every_n_epoch` epochs, shifted.

    Lightning looks at that number after each batch; here it is 1 in epochs that are evaluated after, and more than
    there are epochs in the others.

    Args:
        offset: see `batch_plan.evaluation_is_due`.
    """

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self._every: int | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Remember the configured number."""
        self._every = trainer.check_val_every_n_epoch

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Decide about the epoch that a resumed run is in the middle of."""
        self._decide(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Decide about this epoch."""
        self._decide(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the Trainer its number back."""
        trainer.check_val_every_n_epoch = self._every

    def _decide(self, trainer: pl.Trainer) -> None:
        every: Any = self._every
        if every is not None:  # else Lightning counts batches
            due = evaluation_is_due(trainer.current_epoch, every, self.offset, trainer.max_epochs)
            trainer.check_val_every_n_epoch = 1 if due else NEVER
