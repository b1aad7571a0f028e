"""The state of one run between its begin and its result: what it is made of, and what it leaves behind."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console

from fasttrain import environment
from fasttrain.checkpoints import BEST
from fasttrain.clock import RunClock
from fasttrain.config import Resolved, RunConfig
from fasttrain.errors import ConfigError
from fasttrain.interrupt import graceful_interrupt
from fasttrain.mlperf.benchmark import find_benchmark
from fasttrain.mlperf.logger import MLPerfLogger
from fasttrain.mlperf.page_cache import clear_page_cache
from fasttrain.optimization import Attachment
from fasttrain.outcome import result_of, summary_lines
from fasttrain.plan import Plan, data_module
from fasttrain.plots import write_plots
from fasttrain.progress import ProgressDisplay
from fasttrain.ranks_together import RanksTogether
from fasttrain.recorder import RunRecorder
from fasttrain.results import MetricsFile, RunFolder
from fasttrain.resume import ResumePoint
from fasttrain.run import Prepared
from fasttrain.target import StopAtTarget
from fasttrain.trainer import make_loggers, make_trainer


@runtime_checkable
class DrawsSamples(Protocol):
    """A module that can show what it has learned as pictures."""

    def draw_samples(self, data: pl.LightningDataModule, folder: Path) -> None:
        """Write a few PNG files into the folder."""
        ...


class Session:
    """One run. With several processes each has a session; only the first one's writes and prints.

    Args:
        resolved: the configuration.
        folder: made or found already.
        console: where to print.
        quiet: print nothing.
        started: `time.perf_counter()` of the run's begin.
        watching: further callbacks.
        clock: None for an ordinary one.
    """

    def __init__(
        self,
        resolved: Resolved,
        folder: RunFolder,
        console: Console,
        quiet: bool,
        started: float,
        watching: Sequence[pl.Callback] = (),
        clock: RunClock | None = None,
    ) -> None:
        self.resolved, self.folder, self.console = resolved, folder, console
        self.first = environment.global_rank() == 0
        self.quiet = quiet or not self.first
        self.started = started
        self.config: RunConfig = resolved.run
        self.clock = clock or RunClock()
        self.watching = list(watching)
        self.metrics = MetricsFile(folder.metrics)
        self.target = StopAtTarget(self.config.target) if self.config.target else None
        self.resume_point = ResumePoint(folder.checkpoints, self.config.checkpoint)
        self.mlperf = self._mlperf_logger() if self.config.mlperf.enabled else None
        self.recorder: RunRecorder | None = None
        self.trainer: pl.Trainer | None = None
        self.prepared: Prepared | None = None
        self.result: dict[str, Any] = {}

    def train(self, prepared: Prepared, checkpoint: Path | None) -> None:
        """Apply the plan, and train from the start or from a checkpoint."""
        self.prepared = prepared
        if self.mlperf is not None:
            _refuse_early_data(self.mlperf, prepared)
        self._write_inputs(prepared.plan)
        recorder = self.recorder = RunRecorder(prepared.plan, self.clock, self.started, self._write_plan)
        self.metrics.seconds = lambda: recorder.seconds
        if self.target:
            self.target.moment = lambda: {"seconds": recorder.seconds, "samples": recorder.samples}
        attachments = prepared.plan.attach(prepared.context)
        # It comes first: others begin to read data when training starts, and its clock is to run by then.
        first = [Attachment(callbacks=[self.mlperf])] if self.mlperf is not None else []
        self.trainer = make_trainer(
            self.config.trainer,
            [*first, *attachments],
            self._callbacks(recorder),
            [self.metrics, *make_loggers(self.config.loggers, str(self.folder.path))],
            RanksTogether(takes_sigterm=False, on_loss=self._rank_lost),
            profiler=self.clock,
            default_root_dir=str(self.folder.path),
        )
        with graceful_interrupt(self._interrupted):
            self.trainer.fit(
                prepared.recipe.module,
                datamodule=data_module(attachments, prepared.recipe.data),
                ckpt_path=str(checkpoint) if checkpoint else None,
            )

    def status(self) -> str:
        """Return how a run that came back from Lightning ended."""
        if self.resume_point.interrupted:
            return "interrupted"
        return "reached_target" if self.target and self.target.reached_at else "finished"

    def finish(self, status: str, error: str | None) -> None:
        """Write whatever is known; a failure here must not hide the one that ended the run."""
        seconds = self.recorder.seconds if self.recorder else time.perf_counter() - self.started
        data = self.prepared.recipe.data if self.prepared else None
        self.result = result_of(self.config, status, error, seconds, self.recorder, self.target, self.trainer, data)
        if not self.first:
            return
        try:
            self.metrics.save()
            self.folder.write_json("result.json", self.result)
            self._write_outcome()
            self._write_pictures(status)
        except Exception as failure:  # whatever it is, it must not take the place of the error that ended the run
            self._not_written(failure)
        if not self.quiet and self.recorder is not None:
            mlperf = self.mlperf
            told = [f"mlperf: {mlperf.status}, {mlperf.path}"] if mlperf is not None and mlperf.status else []
            for line in [*summary_lines(self.result, self.folder.path), *told]:
                self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _callbacks(self, recorder: RunRecorder) -> list[pl.Callback]:
        callbacks: list[pl.Callback] = [recorder, *self.watching]
        if self.target:
            callbacks.append(self.target)
        callbacks.append(ProgressDisplay(self.console, recorder, self.target, self.quiet))
        if self.target:
            best = ModelCheckpoint(
                self.folder.checkpoints,
                filename=Path(BEST).stem,
                monitor=self.target.target.metric,
                mode=self.target.target.mode,
                save_top_k=1,
                save_on_train_epoch_end=False,
                enable_version_counter=False,
            )
            callbacks.append(best)
        return [*callbacks, _ForgetRepeated(self.metrics), self.resume_point]

    def _mlperf_logger(self) -> MLPerfLogger:
        config = self.config.mlperf
        if config.benchmark is None:
            raise ConfigError(
                f"mlperf.enabled: the recipe '{self.config.recipe}' names no benchmark; set mlperf.benchmark to the "
                "path of a fasttrain.mlperf.benchmark.Benchmark, like my_project.mlperf.BENCHMARK."
            )
        benchmark = find_benchmark(config.benchmark)
        if config.clear_cache and self.first:
            clear_page_cache()
        number = self.config.seed if config.result is None else config.result
        return MLPerfLogger(
            benchmark,
            self.folder.path / f"result_{number}.txt",
            config.submission,
            seed=self.config.seed,
            started=time.time() - (time.perf_counter() - self.started),
            cache_cleared=config.clear_cache,
        )

    def _write_inputs(self, plan: Plan) -> None:
        if self.first:
            self.folder.write_text("config.yaml", self.resolved.to_yaml())
            self.folder.write_json("environment.json", environment.describe())
            self._write_plan(plan.record())

    def _write_plan(self, record: dict[str, Any]) -> None:
        if self.first:
            self.folder.write_json("plan.json", record)

    def _write_outcome(self) -> None:
        """Write what the optimizations tell of the run; what an earlier part told stays if this one never trained.

        It has a file of its own: plan.json is whole since training began, and a run may be ending on a full disk.
        """
        if self.recorder is None or not self.recorder.training_began:
            return
        record = self.recorder.plan.outcome()
        if record["optimizations"] or (self.folder.path / "optimizations.json").exists():
            self.folder.write_json("optimizations.json", record)
        for told in record["optimizations"]:
            if told["error"]:
                self._not_written(f"what {told['name']} did over the run: {told['error']}")

    def _not_written(self, what: object) -> None:
        self.console.print("not written:", what, style="yellow", highlight=False, markup=False)

    def _interrupted(self) -> None:
        self.resume_point.interrupt()
        if not self.quiet:
            self.console.print("stopping after this step with a checkpoint; Ctrl-C again stops at once", style="yellow")

    def _rank_lost(self, sentence: str) -> None:
        """Leave a result: where the main thread waits for the lost rank it never comes to `finish`."""
        seconds = self.recorder.seconds if self.recorder else 0.0
        result = result_of(self.config, "failed", sentence, seconds, self.recorder, self.target, self.trainer, None)
        if self.first:
            self.folder.write_json("result.json", result)

    def _write_pictures(self, status: str) -> None:
        if self.recorder is None or not self.folder.metrics.exists():
            return
        write_plots(self.folder.path)
        recipe = self.prepared.recipe if self.prepared else None
        if recipe and status != "failed" and isinstance(recipe.module, DrawsSamples):
            recipe.module.draw_samples(recipe.data, self.folder.path / "samples")


def _refuse_early_data(logger: MLPerfLogger, prepared: Prepared) -> None:
    """Hold a closed run to the rule that the clock starts before training data are read."""
    example = prepared.context.example
    if logger.submission.division == "closed" and example is not None and example.was_drawn:
        raise ConfigError(
            "mlperf: an optimization has measured itself on a batch of training data, and in the closed division none "
            "may be read before the clock starts; set measure=false for those whose plan line tells a measurement, or "
            "mlperf.submission.division=open."
        )


class _ForgetRepeated(pl.Callback):
    """Takes values out of metrics.csv that a resumed run is going to log again."""

    def __init__(self, metrics: MetricsFile) -> None:
        self.metrics = metrics

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.metrics.forget_from(trainer.global_step)
