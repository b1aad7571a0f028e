"""Averaged weights (EMA, SWA) updated by a graph of their own.

Lightning's `WeightAveraging` decides on the host at which steps it acts, so that its update can't be part of the step's
graph. The update itself asks the device at every call whether it is the first; from the second on the answer is known,
and what remains are kernels alone.
"""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn, get_swa_multi_avg_fn

from fasttrain.callbacks.cuda_graph_step.culprit import why_capture_failed
from fasttrain.callbacks.cuda_graph_step.recording import Recorder, Recording


class CapturedAveraging:
    """Takes the place of an averaged model's `update_parameters`, until `put_back`.

    Args:
        average: torch's averaged model, on the same device as the model.
        model: whose weights are averaged.
        recorder: captures the update at its third call.
        on_note: called with a sentence if it can't be captured; the update goes on eagerly then.
    """

    def __init__(
        self, average: AveragedModel, model: pl.LightningModule, recorder: Recorder, on_note: Callable[[str], None]
    ) -> None:
        self.average, self.model, self.recorder, self.on_note = average, model, recorder, on_note
        self._plain: Callable[[Any], None] = average.update_parameters
        self._eager_calls = 0
        self._recording: Recording | None = None
        vars(average)["update_parameters"] = self.update

    def update(self, model: pl.LightningModule) -> None:
        """Average the weights once more."""
        if self._recording is None and self._eager_calls == 2:
            self._record()
        if self._recording is not None:
            self._recording.replay()
            return
        self._eager_calls += 1
        with self.recorder.warm_up():
            self._plain(model)

    def forget(self) -> None:
        """Capture anew at the next call: weights lie elsewhere."""
        if self._recording is not None:
            self._recording.release()
        self._recording, self._eager_calls = None, min(self._eager_calls, 1)

    def put_back(self) -> None:
        """Give the averaged model its own update again."""
        self.forget()
        vars(self.average).pop("update_parameters", None)

    def _record(self) -> None:
        try:
            self._recording = self.recorder.record(self._update_again)
        except Exception as error:  # a user's own averaging function may do anything
            self.on_note(f"averaging the weights can't be captured: {why_capture_failed(error)}")
            self._eager_calls += 1  # and never tried again

    @torch.no_grad()
    def _update_again(self) -> None:
        """Do what `AveragedModel.update_parameters` of torch 2.11 to 2.14 does from the second call on."""
        average = self.average
        ours: list[Tensor] = list(average.module.parameters())
        theirs: list[Tensor] = list(self.model.parameters())
        buffers = list(zip(average.module.buffers(), self.model.buffers(), strict=True))
        if average.use_buffers:
            ours, theirs = ours + [o for o, _ in buffers], theirs + [t for _, t in buffers]
        average_one = average.avg_fn
        if average_one is None and average.n_averaged.device.type == "cpu":
            average_one = get_swa_avg_fn()  # where torch has no kernels for lists of tensors
        if average_one is not None and average.multi_avg_fn is None:
            for mine, new in zip(ours, theirs, strict=True):
                mine.detach().copy_(average_one(mine.detach(), new.detach(), average.n_averaged))
        else:
            average_all = average.multi_avg_fn or get_swa_multi_avg_fn()
            for mine_of_kind, new_of_kind in _by_dtype(ours, theirs):
                average_all(mine_of_kind, new_of_kind, average.n_averaged)
        if not average.use_buffers:
            for mine, new in buffers:
                mine.detach().copy_(new.detach())
        average.n_averaged += 1


def captured_averaging(
    trainer: pl.Trainer, recorder: Recorder, on_note: Callable[[str], None]
) -> list[CapturedAveraging]:
    """Return one for each of Lightning's averaging callbacks whose averages are on the model's device."""
    captured = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        average = callback._average_model if isinstance(callback, WeightAveraging) else None
        if average is not None and average.n_averaged.device == trainer.strategy.root_device:
            captured.append(CapturedAveraging(average, trainer.lightning_module, recorder, on_note))
    return captured


def _by_dtype(ours: list[Any], theirs: list[Any]) -> list[tuple[list[Tensor], list[Tensor]]]:
    kinds: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for mine, new in zip(ours, theirs, strict=True):
        pair = kinds.setdefault(mine.dtype, ([], []))
        pair[0].append(mine.detach())
        pair[1].append(new.detach())
    return list(kinds.values())
