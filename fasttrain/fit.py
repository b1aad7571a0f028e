"""One training run, start to finish: build, plan, train, and leave a complete run folder however it ends."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console

from fasttrain import environment
from fasttrain.checkpoints import BEST, LAST, readable_checkpoint
from fasttrain.clock import RunClock
from fasttrain.config import Resolved, RunConfig
from fasttrain.errors import FasttrainError
from fasttrain.interrupt import graceful_interrupt
from fasttrain.plan import Catalogue, Plan
from fasttrain.plots import write_plots
from fasttrain.progress import ProgressDisplay, clock_text
from fasttrain.quiet import quiet_libraries
from fasttrain.recorder import RunRecorder
from fasttrain.results import MetricsFile, RunFolder, disk_error
from fasttrain.resume import ResumePoint
from fasttrain.run import Prepared, prepare
from fasttrain.target import StopAtTarget
from fasttrain.trainer import make_loggers, make_trainer


@runtime_checkable
class DrawsSamples(Protocol):
    """A module that can show what it has learned as pictures."""

    def draw_samples(self, data: pl.LightningDataModule, folder: Path) -> None:
        """Write a few PNG files into the folder."""
        ...


@runtime_checkable
class CountsBadSamples(Protocol):
    """A data module that skips bad samples instead of stopping, and counts them."""

    def bad_samples(self) -> dict[str, int]:
        """Return how many were skipped, by what was wrong with them."""
        ...


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the content of `result.json`, and the folder it is in."""

    result: dict[str, Any]
    folder: Path


def fit(
    resolved: Resolved,
    catalogue: Catalogue,
    *,
    run_dir: Path | None = None,
    resume: Path | None = None,
    console: Console | None = None,
    quiet: bool = False,
) -> Outcome:
    """Train a recipe.

    Args:
        resolved: the configuration; for a resumed run that of its folder, with any overrides.
        catalogue: the optimizations that may be asked for, by name.
        run_dir: folder to make for a new run.
        resume: folder of a run to go on with.
        console: where to write; standard output by default.
        quiet: write nothing but errors.

    Raises:
        FasttrainError: with the sentence for the user; `result.json` says "failed" and holds it too.
    """
    started = time.perf_counter()
    console = console or Console()
    folder = RunFolder.existing(resume) if resume else RunFolder.create(run_dir, str(resolved.config.recipe))
    checkpoint = readable_checkpoint(folder) if resume else None
    with quiet_libraries():
        session = _Session(resolved, folder, console, quiet, started)
        try:
            session.train(prepare_and_say(resolved, catalogue, console, quiet), checkpoint)
        except FasttrainError as error:
            session.finish("failed", str(error))
            raise
        except OSError as error:
            sentence = disk_error(folder.path, error)
            session.finish("failed", str(sentence))
            raise sentence from error
        except (KeyboardInterrupt, SystemExit):
            session.finish("interrupted", "stopped at once by a second Ctrl-C")
        except BaseException as error:
            session.finish("failed", f"{type(error).__name__}: {error}")
            raise
        else:
            session.finish(session.status(), None)
    return Outcome(session.result, folder.path)


def prepare_and_say(resolved: Resolved, catalogue: Catalogue, console: Console, quiet: bool) -> Prepared:
    """Prepare a run and print its preset and plan, a line each."""
    if resolved.preset_note and not quiet:
        console.print(resolved.preset_note, highlight=False, markup=False)
    prepared = prepare(resolved, catalogue)
    if not quiet:
        for line in plan_lines(prepared.plan):
            console.print(line, highlight=False)
    return prepared


def plan_lines(plan: Plan) -> list[str]:
    """Return a line for each optimization: whether it applies, and what was measured or why not."""
    lines = []
    for row in plan.record()["optimizations"]:
        mark = {"applies": "[green]applies[/]", "refused": "[yellow]refused[/]", "off": "[dim]off[/]"}[row["verdict"]]
        reason = str(row["reason"]).replace("[", r"\[")
        lines.append(f"{row['name']}: {mark}{' - ' + reason if reason else ''}")
    return lines


class _Session:
    """The state of one run between its begin and its result."""

    def __init__(self, resolved: Resolved, folder: RunFolder, console: Console, quiet: bool, started: float) -> None:
        self.resolved, self.folder, self.console, self.quiet = resolved, folder, console, quiet
        self.started = started
        self.config: RunConfig = resolved.run
        self.clock = RunClock()
        self.metrics = MetricsFile(folder.metrics)
        self.target = StopAtTarget(self.config.target) if self.config.target else None
        self.resume_point = ResumePoint(folder.checkpoints, self.config.checkpoint)
        self.recorder: RunRecorder | None = None
        self.trainer: pl.Trainer | None = None
        self.prepared: Prepared | None = None
        self.result: dict[str, Any] = {}

    def train(self, prepared: Prepared, checkpoint: Path | None) -> None:
        self.prepared = prepared
        self._write_inputs(prepared.plan)
        recorder = self.recorder = RunRecorder(
            prepared.plan, self.clock, self.started, lambda record: self.folder.write_json("plan.json", record)
        )
        self.metrics.seconds = lambda: recorder.seconds
        if self.target:
            self.target.moment = lambda: {"seconds": recorder.seconds, "samples": recorder.samples}
        attachments = prepared.plan.attach(prepared.context)
        self.trainer = make_trainer(
            self.config.trainer,
            attachments,
            self._callbacks(recorder),
            [self.metrics, *make_loggers(self.config.loggers, str(self.folder.path))],
            profiler=self.clock,
            default_root_dir=str(self.folder.path),
        )
        data = next((a.data for a in reversed(attachments) if a.data is not None), prepared.recipe.data)
        with graceful_interrupt(self._interrupted):
            self.trainer.fit(prepared.recipe.module, datamodule=data, ckpt_path=str(checkpoint) if checkpoint else None)

    def status(self) -> str:
        if self.resume_point.interrupted:
            return "interrupted"
        return "reached_target" if self.target and self.target.reached_at else "finished"

    def finish(self, status: str, error: str | None) -> None:
        """Write whatever is known; a failure here must not hide the one that ended the run."""
        self.result = self._result(status, error)
        try:
            self.metrics.save()
            self.folder.write_json("result.json", self.result)
            self._write_pictures(status)
        except Exception as failure:  # whatever it is, it must not take the place of the error that ended the run
            self.console.print("[yellow]not written:[/]", str(failure), highlight=False, markup=True)
        if not self.quiet and self.recorder is not None:
            self._say_summary(status)

    def _callbacks(self, recorder: RunRecorder) -> list[pl.Callback]:
        callbacks: list[pl.Callback] = [recorder]
        if self.target:
            callbacks.append(self.target)
        callbacks.append(ProgressDisplay(self.console, recorder, self.target, self.quiet))
        if self.target:
            callbacks.append(
                ModelCheckpoint(
                    self.folder.checkpoints,
                    filename=Path(BEST).stem,
                    monitor=self.target.target.metric,
                    mode=self.target.target.mode,
                    save_top_k=1,
                    save_on_train_epoch_end=False,
                    enable_version_counter=False,
                )
            )
        callbacks.append(_ForgetRepeated(self.metrics))
        callbacks.append(self.resume_point)
        return callbacks

    def _write_inputs(self, plan: Plan) -> None:
        self.folder.write_text("config.yaml", self.resolved.to_yaml())
        self.folder.write_json("environment.json", environment.describe())
        self.folder.write_json("plan.json", plan.record())

    def _interrupted(self) -> None:
        self.resume_point.interrupt()
        if not self.quiet:
            self.console.print("stopping after this step with a checkpoint; Ctrl-C again stops at once", style="yellow")

    def _result(self, status: str, error: str | None) -> dict[str, Any]:
        recorder, trainer, target = self.recorder, self.trainer, self.target
        seconds = recorder.seconds if recorder else time.perf_counter() - self.started
        breakdown = recorder.breakdown() if recorder else {}
        # Training's wall time: on a GPU the parts inside it are launch times, their sum may miss where the host waits.
        busy = seconds - sum(breakdown.get(part, 0.0) for part in ("start_up", "evaluation", "checkpoint"))
        samples = recorder.samples if recorder else 0
        goal = self.config.target
        data = self.prepared.recipe.data if self.prepared else None
        return {
            "recipe": self.config.recipe,
            "preset": self.config.preset,
            "status": status,
            "seed": self.config.seed,
            "quality": {
                "name": goal.metric,
                "value": target.scores[-1][1] if target and target.scores else None,
                "best": target.best if target else None,
            } if goal else None,
            "target": {"name": goal.metric, "value": goal.value, "mode": goal.mode} if goal else None,
            "reached": bool(target and target.reached_at),
            "reached_at": target.reached_at if target else None,
            "samples": samples,
            "steps": trainer.global_step if trainer else 0,
            "epochs": trainer.current_epoch if trainer else 0,
            "seconds": round(seconds, 3),
            "samples_per_second": round(samples / busy, 3) if samples and busy > 0 else None,
            "breakdown_seconds": {part: round(value, 3) for part, value in breakdown.items()},
            "bad_samples": data.bad_samples() if isinstance(data, CountsBadSamples) else {},
            "error": error,
        }  # fmt: skip

    def _write_pictures(self, status: str) -> None:
        if self.recorder is None or not self.folder.metrics.exists():
            return
        write_plots(self.folder.path)
        recipe = self.prepared.recipe if self.prepared else None
        if recipe and status != "failed" and isinstance(recipe.module, DrawsSamples):
            recipe.module.draw_samples(recipe.data, self.folder.path / "samples")

    def _say_summary(self, status: str) -> None:
        result = self.result
        words = [f"[bold]{status.replace('_', ' ')}[/]", clock_text(result["seconds"])]
        quality = result["quality"]
        if quality and quality["value"] is not None:
            words.append(f"{quality['name']} {quality['value']:.4f} (best {quality['best']:.4f})")
        if result["samples_per_second"]:
            words.append(f"{result['samples_per_second']:,.0f} samples/s")
        self.console.print("  ".join(words), highlight=False)
        for what, count in result["bad_samples"].items():
            self.console.print(f"[yellow]skipped:[/] {count} {what}", highlight=False)
        self.console.print(f"run folder: {self.folder.path}", highlight=False, markup=False, soft_wrap=True)
        if status in ("interrupted", "failed") and (self.folder.checkpoints / LAST).exists():
            self.console.print(f"go on with: fasttrain fit --resume {self.folder.path}", markup=False, soft_wrap=True)


class _ForgetRepeated(pl.Callback):
    """Takes values out of metrics.csv that a resumed run is going to log again."""

    def __init__(self, metrics: MetricsFile) -> None:
        self.metrics = metrics

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.metrics.forget_from(trainer.global_step)
