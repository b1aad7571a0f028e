"""`EvaluationCache`: stands between Lightning and the evaluation's loader, and says what came of it."""

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info

from fasttrain.callback_door import ActingCallback
from fasttrain.callbacks.evaluation_cache.loader import Doing, KeepingLoader
from fasttrain.callbacks.evaluation_cache.order import why_not_in_order
from fasttrain.errors import ConfigError
from fasttrain.fetching import stand_before_evaluation
from fasttrain.optimization import Change, Table

SHARE_OF_FREE_MEMORY = 0.25


@dataclass(frozen=True)
class EvaluationCacheConfig:
    """The parameters of `EvaluationCache`."""

    most_gb: float | None = None
    """What the batches of an evaluation may take on each device, 10**9 bytes; null is a quarter of what is free there
    when the first one is kept, beside what training has taken by then."""
    compared: int = 1
    """Evaluations whose batches are made again and compared with those kept, bit for bit, before these are used."""

    def __post_init__(self) -> None:
        if self.most_gb is not None and not self.most_gb > 0:
            raise ConfigError(
                f"optimizations.evaluation_cache.most_gb is {self.most_gb}; it must be greater than 0, or null."
            )
        if self.compared < 0:
            raise ConfigError(f"optimizations.evaluation_cache.compared is {self.compared}; it must be at least 0.")


class EvaluationCache(ActingCallback):
    """Keeps a fit's evaluation batches on the device: `Trainer(callbacks=[EvaluationCache()])`.

    The first evaluation's batches are kept, the second's are compared with them, and from the third on the loader makes
    none. Off, with a reason, where they don't fit, come in another order, or are not the same each time.

    Args:
        parameters: those of `EvaluationCacheConfig`.
    """

    def __init__(self, **parameters: Any) -> None:
        super().__init__()
        self.config = EvaluationCacheConfig(**parameters)
        self.notes: list[str] = []
        self.loader: KeepingLoader | None = None
        self._kept_bytes = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stand before the loader, if there is one."""
        device = trainer.strategy.root_device
        if device.type != "cuda" and self.config.most_gb is None:
            rank_zero_info(
                f"EvaluationCache: this run is on the {device.type}; nothing changes unless most_gb says what the "
                "batches may take."
            )
            return
        if (reason := why_not_in_order(trainer.val_dataloaders)) is not None:
            self._note(reason)
            return

        def make(inner: CombinedLoader) -> KeepingLoader:
            return KeepingLoader(inner, device, lambda: self._most_bytes(device), self.config.compared, self._note)

        self.loader = stand_before_evaluation(trainer, make)
        if self.loader is not None:
            self.changes = [Change("val_dataloader", f"batches kept on {device} after the first evaluation")]

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give up where Lightning has made its loader anew."""
        loader = self.loader
        if loader is not None and trainer.val_dataloaders is not loader.iterables:
            loader.stop("Lightning makes the loader anew (reload_dataloaders_every_n_epochs)")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note what they take."""
        if self.loader is not None:
            self._kept_bytes = max(self._kept_bytes, self.loader.kept.bytes)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the memory back."""
        if self.loader is not None:
            self.loader.kept.clear()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """The same; Lightning calls nothing else then."""
        self.teardown(trainer, pl_module, "")

    def table(self) -> Table:
        """Return where the evaluations' batches came from, and what those kept take."""
        columns = ("evaluations", "their batches were")
        passes = self.loader.passes if self.loader is not None else {}
        rows = [(count, doing.value) for doing, count in passes.items() if count]
        size = f"{self._kept_bytes / 1e9:,.2f} GB were kept" if self._kept_bytes else "nothing was kept"
        return Table("evaluation batches", columns, rows, note="; ".join([size, *self.notes]))

    def _most_bytes(self, device: torch.device) -> float:
        return most_bytes(self.config, device)

    def _note(self, reason: str) -> None:
        self.notes.append(f"batches are made anew for each evaluation, since {reason}")
        rank_zero_info(f"EvaluationCache: batches are made anew for each evaluation, since {reason}.")


def most_bytes(config: EvaluationCacheConfig, device: torch.device) -> float:
    """Return what batches may take on a device."""
    if config.most_gb is not None:
        return config.most_gb * 1e9
    return SHARE_OF_FREE_MEMORY * torch.cuda.mem_get_info(device)[0]


__all__ = ["Doing", "EvaluationCache", "EvaluationCacheConfig", "most_bytes"]
