"""Evaluation by samples: every so many of them, whatever the batches and epochs."""

from typing import Any

import lightning.pytorch as pl

from fasttrain.errors import ConfigError
from fasttrain.recorder import SampleCounter, sample_counter
from fasttrain.trainer import validate_after_this_batch


class EvaluateEvery(pl.Callback):
    """Has the Trainer validate after the batch with which so many more samples have been trained on.

    It takes the place of `val_check_interval` and of validation at the end of an epoch.

    Args:
        samples: of all processes. Where a data module counts sequences (`sequences_seen`), these are the samples.
    """

    def __init__(self, samples: int) -> None:
        if samples < 1:
            raise ConfigError(f"an evaluation every {samples} samples was asked for; it must be at least 1.")
        self.every = samples
        self.samples = 0
        self._count: SampleCounter | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ask who counts."""
        self._count = sample_counter(trainer, pl_module)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        """Say whether validation follows this batch. Before it, since other callbacks ask at its end."""
        assert self._count is not None
        before, self.samples = self.samples, self._count(batch, self.samples)
        validate_after_this_batch(trainer, self.samples // self.every > before // self.every)

    def state_dict(self) -> dict[str, Any]:
        """Return the count."""
        return {"samples": self.samples}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self.samples = int(state_dict["samples"])
