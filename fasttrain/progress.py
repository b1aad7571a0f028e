"""What a user sees while a run goes on: a bar in a terminal, a line for each evaluation anywhere else, or nothing."""

from typing import Any

import lightning.pytorch as pl
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn

from fasttrain.recorder import RunRecorder
from fasttrain.target import StopAtTarget


class ProgressDisplay(pl.callbacks.ProgressBar):
    """A rich bar with loss, throughput, time left and time to target.

    Values are read from the device when the bar is drawn, a few times a second, and never at every step.

    Args:
        console: where to draw.
        recorder: knows samples and seconds.
        target: knows scores; None when the run has no target.
        quiet: show nothing at all.
    """

    def __init__(self, console: Console, recorder: RunRecorder, target: StopAtTarget | None, quiet: bool) -> None:
        super().__init__()
        self.console, self.recorder, self.target = console, recorder, target
        self.drawn = console.is_terminal and not quiet
        self.lines = not quiet
        self._bar: Progress | None = None
        self._training: TaskID | None = None
        self._evaluating: TaskID | None = None
        self._drawn_at = 0.0
        self._first: tuple[int, float] | None = None

    def disable(self) -> None:
        """Lightning turns the bar off on all ranks but the first."""
        self.drawn = self.lines = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw the bar."""
        self._first = (trainer.global_step, self.recorder.seconds)
        if not self.drawn:
            return
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[words]}"),
            console=self.console,
            refresh_per_second=4,
        )
        total = self._total_steps(trainer)
        self._training = self._bar.add_task("training", total=total, completed=trainer.global_step, words="")
        self._bar.start()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move the bar, at most four times a second."""
        if self._bar is None or self._training is None:
            return
        now = self.recorder.seconds
        if now - self._drawn_at >= 0.25:
            self._drawn_at = now
            self._bar.update(self._training, completed=trainer.global_step, words=self._words(trainer))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin a bar of its own."""
        if self._bar is not None:
            total = sum(n for n in trainer.num_val_batches if n != float("inf"))
            self._evaluating = self._bar.add_task("evaluating", total=total or None, words="")

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Move it."""
        if self._bar is not None and self._evaluating is not None:
            self._bar.advance(self._evaluating)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say the score in a line that stays."""
        if self._bar is not None and self._evaluating is not None:
            self._bar.remove_task(self._evaluating)
            self._evaluating = None
        if self.lines and not trainer.sanity_checking:
            self.console.print(self._evaluation_line(trainer), highlight=False)

    def print(self, *words: Any, **options: Any) -> None:
        """Say a line that stays: Lightning's way for others to print beside the bar."""
        if self.lines:
            self.console.print(*words, highlight=False, markup=False)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the bar down, complete."""
        if self._bar is not None:
            if self._training is not None:
                self._bar.update(self._training, completed=trainer.global_step, words=self._words(trainer))
            self._bar.stop()
            self._bar = None

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Take it down here too, or the terminal would stay without a cursor."""
        self.on_train_end(trainer, pl_module)

    def _total_steps(self, trainer: pl.Trainer) -> float | None:
        total = trainer.estimated_stepping_batches
        return None if total == float("inf") else total

    def _words(self, trainer: pl.Trainer) -> str:
        words = []
        loss = next((v for k, v in trainer.callback_metrics.items() if k in ("loss", "train_loss")), None)
        if loss is not None:
            words.append(f"loss {float(loss):.3f}")
        if self.recorder.throughput:
            words.append(f"{self.recorder.throughput:,.0f} samples/s")
        left = self._seconds_left(trainer)
        if left is not None:
            words.append(f"{clock_text(left)} left")
        to_target = self._seconds_to_target(trainer)
        if to_target is not None:
            words.append(f"≈{clock_text(to_target)} to target")
        return " · ".join(words)

    def _seconds_left(self, trainer: pl.Trainer) -> float | None:
        total, seconds_a_step = self._total_steps(trainer), self._seconds_a_step(trainer)
        if total is None or seconds_a_step is None:
            return None
        return seconds_a_step * (total - trainer.global_step)

    def _seconds_a_step(self, trainer: pl.Trainer) -> float | None:
        """Return wall seconds a step since training began, evaluations included."""
        if self._first is None or trainer.global_step <= self._first[0]:
            return None
        return (self.recorder.seconds - self._first[1]) / (trainer.global_step - self._first[0])

    def _seconds_to_target(self, trainer: pl.Trainer) -> float | None:
        """Carry the line through the last two evaluations on to the target; None where it never gets there."""
        if self.target is None or self.target.reached_at or len(self.target.scores) < 2:
            return None
        (step_1, score_1), (step_2, score_2) = self.target.scores[-2:]
        gain, missing = score_2 - score_1, self.target.target.value - score_2
        seconds_a_step = self._seconds_a_step(trainer)
        if step_2 <= step_1 or seconds_a_step is None or not gain * missing > 0:  # NaN is not
            return None
        reached_at_step = step_2 + missing / gain * (step_2 - step_1)
        return max(0.0, reached_at_step - trainer.global_step) * seconds_a_step

    def _evaluation_line(self, trainer: pl.Trainer) -> str:
        parts = [f"step {trainer.global_step:,}", f"epoch {trainer.current_epoch + 1}",
                 clock_text(self.recorder.seconds)]  # fmt: skip
        if self.recorder.throughput:
            parts.append(f"{self.recorder.throughput:,.0f} samples/s")
        # A score that arrives late belongs to another step, and is told when it arrives.
        if self.target is not None and self.target.scores and self.target.scores[-1][0] == trainer.global_step:
            goal = self.target.target
            state = "reached" if self.target.reached_at else f"target {goal.value:g}"
            parts.append(f"{goal.metric} {self.target.scores[-1][1]:.4f} ({state})")
        else:
            parts += [f"{k} {float(v):.4g}" for k, v in list(trainer.logged_metrics.items())[-3:]]
        return "  ".join(parts)


def clock_text(seconds: float) -> str:
    """Return seconds as m:ss or h:mm:ss."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"
