"""Ctrl-C once stops at the next exact place with a checkpoint, twice at once; SIGTERM is the same wish."""

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fasttrain import interrupt
from fasttrain.checkpoints import LAST
from fasttrain.config import CheckpointConfig, TrainerConfig
from fasttrain.interrupt import graceful_interrupt
from fasttrain.resume import ResumePoint
from fasttrain.trainer import make_trainer

BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@BOTH
def test_the_first_signal_asks_and_a_later_one_stops(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: now[0])
    asked = []
    with graceful_interrupt(lambda: asked.append(1)):
        send(number)
        assert asked == [1]
        now[0] += 0.5
        send(number)  # the same wish, delivered twice
        now[0] += 5
        with pytest.raises(KeyboardInterrupt):
            send(number)
    assert asked == [1]


def test_the_former_handlers_come_back() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with suppress(RuntimeError), graceful_interrupt(lambda: None):
        assert signal.getsignal(signal.SIGINT) is not before[signal.SIGINT]
        raise RuntimeError
    assert {number: signal.getsignal(number) for number in before} == before


def test_in_another_thread_nothing_is_done() -> None:
    seen: list[Any] = []

    def work() -> None:
        with graceful_interrupt(lambda: None):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.net(batch[0]).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Sends(pl.Callback):
    """Sends a signal in the middle of a step or of an evaluation."""

    def __init__(self, number: signal.Signals, step: int, where: str) -> None:
        self.number, self.step, self.where = number, step, where

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.where == "step" and trainer.global_step == self.step - 1:
            send(self.number)

    def on_validation_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        if self.where == "evaluation" and trainer.global_step == self.step and batch_idx == 0:
            send(self.number)


@BOTH
@pytest.mark.parametrize(
    ("step", "where", "stops_at"),
    [(2, "step", 2), (4, "step", 4), (8, "step", 8), (4, "evaluation", 4), (12, "step", 12)],
)
def test_a_signal_while_training_leaves_a_checkpoint(
    tmp_path: Path, number: signal.Signals, step: int, where: str, stops_at: int
) -> None:
    """An epoch has four steps and is validated at its end: there the stop waits for the validation."""
    point = ResumePoint(tmp_path, CheckpointConfig(every_n_minutes=None))
    data = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)
    config = TrainerConfig(accelerator="cpu", max_epochs=3)
    trainer = make_trainer(config, [], [Sends(number, step, where), point], [], enable_progress_bar=False)
    with graceful_interrupt(point.interrupt):
        trainer.fit(Net(), data, data)
    assert trainer.global_step == stops_at
    assert point.interrupted
    assert torch.load(tmp_path / LAST, weights_only=True)["global_step"] == stops_at
