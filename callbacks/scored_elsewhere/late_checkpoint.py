"""A best checkpoint whose score arrives late: the weights are saved when they are evaluated, and named when judged.

Reaches into Lightning's `ModelCheckpoint`; written against Lightning 2.6.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from fasttrain.callbacks.scored_elsewhere.evaluation import Tag
from fasttrain.errors import ConfigError


class LateCheckpoint:
    """Stands before one `ModelCheckpoint` that monitors a late score, during a fit.

    Where it would save, a candidate file is saved beside its checkpoints. Lightning's own code decides when the score
    has arrived, under the names and scores that it would have had; only, instead of saving, the candidate is renamed.
    All ranks decide alike, and the first moves files.

    Args:
        checkpoint: whose best files these are.
        tag: returns the tag of the evaluation that is ending if it is scored elsewhere.
        is_first: whether this is the first rank.
    """

    def __init__(self, checkpoint: ModelCheckpoint, tag: Callable[[], Tag | None], is_first: bool = True) -> None:
        keeper: Any = checkpoint  # whose private methods are no part of its type
        self.checkpoint, self.is_first = keeper, is_first
        self.saving = False
        """Whether a candidate is being saved at this moment."""
        self._expects = False
        self._from_before: set[Tag] = set()
        self._candidates: dict[Tag, tuple[Path, dict[str, Tensor]]] = {}
        self._decide = keeper._save_topk_checkpoint

        def save_topk(trainer: pl.Trainer, metrics: dict[str, Tensor]) -> None:
            late = tag()
            if keeper.monitor in metrics or not keeper.save_top_k or not self._expects:
                self._decide(trainer, metrics)
            elif late is not None:  # weights that no evaluation has seen have no score, and are not compared
                self._save_candidate(trainer, late, metrics)

        keeper._save_topk_checkpoint = save_topk

    def expect(self, trainer: pl.Trainer, tag: Tag) -> None:
        """An evaluation goes to be scored; whether its weights are saved is `ModelCheckpoint`'s own schedule."""
        self._expects = True

    def expect_from_before(self, tag: Tag) -> None:
        """An evaluation of the run that is resumed is scored again. If it was before, its file has its name already."""
        self._from_before.add(tag)

    def judge(self, trainer: pl.Trainer, tag: Tag, scores: Mapping[str, float]) -> None:
        """Keep the evaluation's candidate under its proper name, or remove it.

        Raises:
            ConfigError: the scores hold no value of the monitored name.
        """
        late = {name: torch.tensor(value, dtype=torch.float64) for name, value in scores.items()}
        path, metrics = self._candidates.pop(tag, (None, {}))
        if path is not None:
            try:
                if self.checkpoint.monitor not in scores:
                    raise ConfigError(
                        f"ModelCheckpoint monitors '{self.checkpoint.monitor}', but the score function gives no such "
                        f"value; it gives: {', '.join(sorted(scores))}."
                    )
                self._decide_about(trainer, path, {**metrics, **late})
            finally:
                self._remove(path)
        elif tag in self._from_before and self.checkpoint.monitor in scores:
            late.update(step=torch.tensor(tag.step), epoch=torch.tensor(tag.epoch))
            path = Path(self.checkpoint.format_checkpoint_name(late))
            if trainer.strategy.broadcast(_step_of(path) if self.is_first else None) == tag.step:
                self._decide_about(trainer, path, late)

    def forget(self, tag: Tag) -> None:
        """Remove the candidate of an evaluation without a score."""
        path, _ = self._candidates.pop(tag, (None, {}))
        if path is not None:
            self._remove(path)

    def release(self) -> None:
        """Remove all candidates and leave the checkpoint callback as it was found."""
        for tag in list(self._candidates):
            self.forget(tag)
        del self.checkpoint._save_topk_checkpoint

    def _decide_about(self, trainer: pl.Trainer, path: Path, metrics: dict[str, Tensor]) -> None:
        """Let Lightning decide whether and under what name to save; the file is there and only renamed."""
        checkpoint = self.checkpoint

        def take(trainer: pl.Trainer, filepath: str) -> None:
            if self.is_first:
                os.replace(path, filepath)
            checkpoint._last_checkpoint_saved = filepath
            for logger in trainer.loggers:
                logger.after_save_checkpoint(checkpoint)

        checkpoint._save_checkpoint = take
        try:
            self._decide(trainer, metrics)
        finally:
            del checkpoint._save_checkpoint

    def _save_candidate(self, trainer: pl.Trainer, tag: Tag, metrics: dict[str, Tensor]) -> None:
        name = f".candidate-{self.checkpoint.monitor}-{tag.step}{self.checkpoint.FILE_EXTENSION}".replace("/", "-")
        path = Path(self.checkpoint.dirpath) / name
        self.saving = True
        try:
            trainer.save_checkpoint(path, self.checkpoint.save_weights_only)
        finally:
            self.saving = False
        self.checkpoint._last_global_step_saved = trainer.global_step
        self._candidates[tag] = path, metrics

    def _remove(self, path: Path) -> None:
        if self.is_first:
            path.unlink(missing_ok=True)


def _step_of(path: Path) -> int | None:
    """Return the step of a checkpoint; None where there is none that can be read."""
    try:
        return int(torch.load(path, map_location="cpu", mmap=True)["global_step"])
    except Exception:  # whatever is wrong with the file, it is not the one that is looked for
        return None
