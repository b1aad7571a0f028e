"""The target: noted where it is first reached; the run stops there. The progress: a line an evaluation, or a bar."""

import io
import math
import time
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fasttrain.clock import RunClock
from fasttrain.config import TargetConfig
from fasttrain.errors import ConfigError
from fasttrain.plan import Plan
from fasttrain.progress import ProgressDisplay, clock_text
from fasttrain.recorder import RunRecorder
from fasttrain.target import StopAtTarget


class Scores(pl.LightningModule):
    """Logs the given scores, one an evaluation."""

    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.scores = iter(scores)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def on_validation_epoch_end(self) -> None:
        self.log("map", next(self.scores))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(count: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(count, 2)), batch_size=2)


def train(
    scores: list[float], target: TargetConfig | None, *, terminal: bool = False, quiet: bool = False, **options: Any
) -> tuple[pl.Trainer, StopAtTarget | None, str]:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=200)
    recorder = RunRecorder(Plan(), RunClock(), time.perf_counter(), lambda record: None)
    stop = StopAtTarget(target) if target else None
    if stop:
        stop.moment = lambda: {"samples": recorder.samples}
    callbacks = [c for c in (recorder, stop, ProgressDisplay(console, recorder, stop, quiet)) if c]
    trainer = pl.Trainer(
        accelerator="cpu", callbacks=callbacks, logger=False, enable_model_summary=False, enable_checkpointing=False,
        **{"max_epochs": len(scores), "num_sanity_val_steps": 0, "log_every_n_steps": 1, **options},
    )  # fmt: skip
    trainer.fit(Scores(scores), loader(6), loader(2))
    assert isinstance(console.file, io.StringIO)
    return trainer, stop, console.file.getvalue()


def test_the_run_stops_where_the_target_is_reached() -> None:
    trainer, stop, _ = train([0.1, 0.5, 0.6], TargetConfig("map", 0.5))
    assert stop is not None
    assert trainer.global_step == 6
    assert stop.scores == [(3, pytest.approx(0.1)), (6, pytest.approx(0.5))]
    assert stop.reached_at == {"step": 6, "epoch": 1, "samples": 12}
    assert stop.best == pytest.approx(0.5)


def test_stop_false_only_notes_it() -> None:
    trainer, stop, _ = train([0.6, 0.2, 0.7], TargetConfig("map", 0.5, stop=False))
    assert stop is not None
    assert trainer.global_step == 9
    assert stop.reached_at is not None
    assert stop.reached_at["step"] == 3
    assert stop.best == pytest.approx(0.7)


def test_smaller_may_be_better() -> None:
    trainer, stop, _ = train([0.6, 0.4, 0.1], TargetConfig("map", 0.5, mode="min"))
    assert stop is not None
    assert trainer.global_step == 6
    assert stop.best == pytest.approx(0.4)


@pytest.mark.parametrize("mode", ["max", "min"])
def test_nan_is_no_target_reached(mode: Any) -> None:
    trainer, stop, _ = train([math.nan, math.nan], TargetConfig("map", 0.5, mode=mode))
    assert stop is not None
    assert stop.reached_at is None
    assert trainer.global_step == 6
    assert stop.best is not None
    assert math.isnan(stop.best)


def test_the_best_score_is_a_number_where_there_is_one() -> None:
    stop = StopAtTarget(TargetConfig("map", 0.5))
    assert stop.best is None
    stop.scores = [(1, math.nan), (2, 0.3), (3, math.nan), (4, 0.2)]
    assert stop.best == 0.3


def test_a_score_that_nobody_logs() -> None:
    with pytest.raises(ConfigError) as caught:
        train([0.1], TargetConfig("mAP", 0.5))
    assert str(caught.value) == (
        "target.metric is 'mAP', but Scores logs no such value in validation; it logs: loss, map."
    )


def test_the_sanity_check_is_no_evaluation() -> None:
    _, stop, shown = train([0.9, 0.1, 0.1], TargetConfig("map", 0.5), num_sanity_val_steps=1, max_epochs=2)
    assert stop is not None
    assert [step for step, _ in stop.scores] == [3, 6]
    assert shown.count("map") == 2


def test_scores_go_on_after_a_resume() -> None:
    first = StopAtTarget(TargetConfig("map", 0.5))
    first.scores, first.reached_at = [(3, 0.6)], {"step": 3}
    second = StopAtTarget(TargetConfig("map", 0.5))
    second.load_state_dict(first.state_dict())
    assert (second.scores, second.reached_at) == (first.scores, first.reached_at)
    raised = StopAtTarget(TargetConfig("map", 0.7))
    raised.load_state_dict(first.state_dict())
    assert (raised.scores, raised.reached_at) == (first.scores, None)


def test_ranks_decide_by_the_first_ranks_score() -> None:
    """Where each rank logs the score of its own share, one of them must not stop alone."""
    stop = StopAtTarget(TargetConfig("map", 0.5))
    trainer: Any = SimpleNamespace(
        sanity_checking=False, state=SimpleNamespace(fn="fit"), callback_metrics={"map": torch.tensor(0.9)},
        strategy=SimpleNamespace(broadcast=lambda value: 0.4), global_step=1, current_epoch=0, should_stop=False,
    )  # fmt: skip
    stop.on_validation_end(trainer, pl.LightningModule())
    assert stop.scores == [(1, 0.4)]
    assert not trainer.should_stop


def test_a_line_an_evaluation_where_there_is_no_terminal() -> None:
    _, _, shown = train([0.1, 0.5, 0.6], TargetConfig("map", 0.5))
    first, second = shown.splitlines()
    assert first.startswith("step 3  epoch 1  0:0")
    assert "samples/s" in first
    assert first.endswith("map 0.1000 (target 0.5)")
    assert second.startswith("step 6  epoch 2  0:0")
    assert second.endswith("map 0.5000 (reached)")
    assert "\x1b" not in shown


def test_without_a_target_the_logged_values_are_shown() -> None:
    _, _, shown = train([0.25], None)
    assert "map 0.25" in shown
    assert "loss" in shown


def test_quiet_is_silent() -> None:
    assert train([0.1], TargetConfig("map", 0.5), quiet=True)[2] == ""
    assert train([0.1], TargetConfig("map", 0.5), quiet=True, terminal=True)[2] == ""


def test_a_bar_in_a_terminal_that_ends_complete() -> None:
    _, _, shown = train([0.1, 0.2], TargetConfig("map", 0.5), terminal=True)
    assert "training" in shown
    assert "6/6" in shown, "the last drawing shows the last step"
    assert "map 0.1000 (target 0.5)" in shown
    assert shown.rstrip().endswith("\x1b[?25h") or "\x1b[?25h" in shown, "the cursor is back"


def test_the_cursor_comes_back_after_an_exception() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    recorder = RunRecorder(Plan(), RunClock(), time.perf_counter(), lambda record: None)

    class Breaks(Scores):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise RuntimeError("broken")

    trainer = pl.Trainer(
        accelerator="cpu", callbacks=[recorder, ProgressDisplay(console, recorder, None, False)], logger=False,
        enable_model_summary=False, enable_checkpointing=False, max_epochs=1,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(Breaks([0.1]), loader(6))
    assert isinstance(console.file, io.StringIO)
    assert "\x1b[?25h" in console.file.getvalue()


def display(scores: list[tuple[int, float]], step: int, mode: Any = "max", seconds: float = 100.0) -> tuple[Any, Any]:
    stop = StopAtTarget(TargetConfig("map", 0.5, mode=mode))
    stop.scores = scores
    recorder: Any = SimpleNamespace(seconds=seconds, throughput=None)
    shown = ProgressDisplay(Console(file=io.StringIO()), recorder, stop, False)
    shown._first = (0, 0.0)
    trainer: Any = SimpleNamespace(global_step=step, estimated_stepping_batches=1000, callback_metrics={})
    return shown, trainer


@pytest.mark.parametrize(
    ("scores", "step", "mode", "seconds"),
    [
        ([(100, 0.1), (200, 0.2)], 200, "max", 150.0),  # 0.5 at step 500, 300 steps on, half a second each
        ([(100, 0.1), (200, 0.2)], 400, "max", 25.0),  # nearer now: 100 steps of a quarter second
        ([(100, 0.1), (200, 0.2)], 600, "max", 0.0),  # later than the line says
        ([(100, 0.9), (200, 0.7)], 200, "min", 50.0),
        ([(100, 0.2), (200, 0.1)], 200, "max", None),  # away from it
        ([(100, 0.2), (200, 0.2)], 200, "max", None),
        ([(100, 0.2)], 200, "max", None),
        ([(100, 0.2), (200, math.nan)], 200, "max", None),
    ],
)
def test_time_to_target(scores: Any, step: int, mode: Any, seconds: float | None) -> None:
    shown, trainer = display(scores, step, mode)
    assert shown._seconds_to_target(trainer) == (None if seconds is None else pytest.approx(seconds))


def test_time_left() -> None:
    shown, trainer = display([], 200)
    assert shown._seconds_left(trainer) == pytest.approx(400.0)
    assert "6:40 left" in shown._words(trainer)
    trainer.estimated_stepping_batches = math.inf
    assert shown._seconds_left(trainer) is None
    trainer.global_step = 0
    assert shown._seconds_left(trainer) is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3661, "1:01:01"), (-3, "0:00")]
)
def test_clock_text(seconds: float, text: str) -> None:
    assert clock_text(seconds) == text
