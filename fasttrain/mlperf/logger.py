"""`MLPerfLogger`: writes MLPerf Training's result file for any fit."""

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import rank_zero_warn

from fasttrain.environment import Hardware
from fasttrain.errors import ConfigError
from fasttrain.mlperf.benchmark import Benchmark, RunFacts
from fasttrain.mlperf.config import SubmissionConfig
from fasttrain.mlperf.lines import ResultFile, now_ms
from fasttrain.order import Resumable
from fasttrain.recorder import SampleCounter, sample_counter
from fasttrain.target import StopAtTarget
from fasttrain.trainer import before_training_loaders, epoch_is_complete, training_loaders

MINUTE_MS = 60_000
INIT_LIMIT_MS = {"closed": 30 * MINUTE_MS, "open": 240 * MINUTE_MS}
"""Initialisation beyond this is on the clock (training_policies, training_rules.adoc of v2.0)."""


class MLPerfLogger(pl.Callback):
    """Tells a fit as MLPerf's events: `Trainer(callbacks=[StopAtTarget(...), MLPerfLogger(BENCHMARK, file)])`.

    The clock, from `run_start` to `run_stop`, begins before the first training batch is asked for, or before loaders
    are made whose processes read ahead, or where initialisation has taken all its time, and ends with the score that
    reaches the target, however late that arrives. Of several processes the first one writes. A resumed fit has no such
    time: it writes nothing, and warns.

    Args:
        benchmark: what is attempted.
        path: of the file, `result_N.txt`; begun when the clock starts.
        submission: the `submission_*` values.
        seed: told as such.
        started: `time.time()` of the run's begin, for `init_start`; None is now.
        cache_cleared: whether the system's cache of files was emptied before.

    Raises:
        ConfigError: at `setup`, when the fit's target is another score or, in the closed division, easier than the
            benchmark's; after an evaluation that logged no such score.
    """

    def __init__(
        self,
        benchmark: Benchmark,
        path: str | Path,
        submission: SubmissionConfig | None = None,
        *,
        seed: int | None = None,
        started: float | None = None,
        cache_cleared: bool = False,
    ) -> None:
        self.benchmark, self.path = benchmark, Path(path)
        self.submission = submission or SubmissionConfig()
        self.seed, self.cache_cleared = seed, cache_cleared
        self.status: str | None = None
        """`success` or `aborted` once `run_stop` was told."""
        self._init_ms = now_ms() if started is None else int(started * 1000)
        self._file: ResultFile | None = None  # on the first process, while there is something to tell
        self._target: StopAtTarget | None = None
        self._put_back: list[Any] = []
        self._begin()

    def _begin(self) -> None:
        """Forget a fit before."""
        self.status = None
        self._loaders_made_ms: int | None = None
        self._evaluated: dict[int, float] = {}  # step -> epoch_num
        self._epoch: int | None = None  # the one that has begun and not ended
        self._eval_samples_told = False
        self._count: SampleCounter | None = None
        self._samples = self._samples_before = 0
        self._trained_seconds = 0.0
        self._since: float | None = None  # when training went on

    # ---- before the clock --------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find who judges scores, and say who would submit."""
        if stage != "fit":
            return
        self._begin()
        callbacks: list[pl.Callback] = vars(trainer)["callbacks"]
        self._target = next((each for each in callbacks if isinstance(each, StopAtTarget)), None)
        self._judge_target()
        if not trainer.is_global_zero:
            return
        if self._target is not None:
            self._target.listeners.append(self._scored)
            self._put_back.append(lambda target=self._target: target.listeners.remove(self._scored))
        self._put_back.append(before_training_loaders(trainer, self._note_loaders))
        file = self._file = ResultFile(self.path)
        file.event("cache_clear", self.cache_cleared, time_ms=self._init_ms)
        file.event("init_start", time_ms=self._init_ms)
        submission = self.submission
        platform = submission.platform or f"{trainer.world_size}x{Hardware.here().name}"
        values = {"benchmark": self.benchmark.name, "org": submission.org, "division": submission.division,
                  "status": submission.status, "platform": platform}  # fmt: skip
        for key, value in values.items():
            file.event(f"submission_{key}", value)
        file.event("mlperf_ruleset", self.benchmark.ruleset)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        file = self._file
        if file is None:
            return
        if trainer.global_step or trainer.current_epoch:
            rank_zero_warn(f"mlperf: a resumed fit has no time to train, so {self.path.name} is left as it is.")
            self._file = None
            return
        run = _facts(trainer, pl_module)
        self._count = sample_counter(trainer, pl_module)
        begun = self._clock_has_begun(trainer)
        if begun is None:
            self._describe(run, file)
        file.event("init_stop", time_ms=begun)
        file.event("run_start", time_ms=begun)
        if begun is not None:
            self._describe(run, file)
        sizes = run.sizes()
        if self.benchmark.progress == "epochs":
            file.event("train_samples", sizes.get("train"))
        else:  # NVIDIA's BERT, v2.0: one block, and how many samples it took when it ends
            file.event("block_start", first_epoch_num=1, epoch_count=1)
        if "val" in sizes:
            file.event("eval_samples", sizes["val"])
        self._eval_samples_told = "val" in sizes
        file.open()
        self._since = time.perf_counter()

    # ---- the run -----------------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tell that an epoch begins."""
        if self._file is not None and self.benchmark.progress == "epochs":
            self._epoch = trainer.current_epoch + 1
            self._file.event("epoch_start", epoch_num=self._epoch)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count."""
        if self._count is not None:
            self._samples = self._count(batch, self._samples)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tell that an epoch has ended, unless its evaluation was the occasion."""
        if epoch_is_complete(trainer):
            self._end_epoch()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tell that an evaluation begins."""
        file = self._file
        if file is None or trainer.sanity_checking or trainer.state.fn != "fit" or self._count is None:
            return
        if self._since is not None:
            self._trained_seconds += time.perf_counter() - self._since
            self._since = None
        if epoch_is_complete(trainer):
            self._end_epoch()
        elif self.benchmark.progress == "samples":
            self._tell_throughput(self._samples)
        if not self._eval_samples_told:  # Lightning makes these loaders when they are first needed
            file.event("eval_samples", _facts(trainer, pl_module).sizes().get("val"))
            self._eval_samples_told = True
        number = self._evaluated[trainer.global_step] = self._epoch_num(trainer)
        file.event("eval_start", epoch_num=number)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on training; take the score where no target is judged by it.

        Raises:
            ConfigError: the module logs no score of the benchmark's name.
        """
        if self._file is None or trainer.sanity_checking or trainer.state.fn != "fit" or self._count is None:
            return
        self._since = time.perf_counter()
        if self._target is None:
            found = trainer.callback_metrics.get(self.benchmark.metric)
            if found is None:
                logged = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
                raise ConfigError(
                    f"mlperf: {self.benchmark.name} is scored by '{self.benchmark.metric}', which is not logged when "
                    f"the evaluation ends; logged are: {logged}. For scores that come later, add "
                    "fasttrain.target.StopAtTarget to the callbacks."
                )
            self._scored(float(found), trainer.global_step)

    def _scored(self, score: float, step: int) -> None:
        """Tell a score, which may be late, of the weights after a step; stop the clock if it is good enough."""
        if self._file is None:
            return
        number = self._evaluated.get(step)
        self._file.event("eval_accuracy", score, epoch_num=number)
        self._file.event("eval_stop", epoch_num=number)
        judge = self._target or self.benchmark
        if judge.is_reached_by(score):
            self._stop("success", epoch_num=number)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tell that the target was not reached; all scores have arrived by now."""
        self._stop("aborted")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Tell that the run was broken off."""
        self._stop("aborted")
        self._release()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave the Trainer and the target as they were."""
        self._release()

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _judge_target(self) -> None:
        if self._target is None:
            return
        goal, benchmark = self._target.target, self.benchmark
        if goal.metric != benchmark.metric:
            raise ConfigError(
                f"mlperf: {benchmark.name} is scored by '{benchmark.metric}', but target.metric is '{goal.metric}'; "
                f"set target.metric={benchmark.metric}."
            )
        if self.submission.division == "closed" and not benchmark.is_reached_by(goal.value):
            raise ConfigError(
                f"mlperf: the closed division's target of {benchmark.name} is {benchmark.target:g}, but target.value "
                f"is {goal.value:g}, which is easier; raise it, or set mlperf.submission.division=open."
            )

    def _note_loaders(self) -> None:
        self._loaders_made_ms = now_ms()

    def _clock_has_begun(self, trainer: pl.Trainer) -> int | None:
        """Return when the clock had to start by the rules, if that was before now."""
        latest = self._init_ms + INIT_LIMIT_MS[self.submission.division] - 1
        begun = [latest] if now_ms() > latest else []
        if not all(_reads_when_asked(loader) for loader in training_loaders(trainer)):
            # A loader's processes have been reading since it was made.
            begun.append(latest if self._loaders_made_ms is None else self._loaders_made_ms)
        return min(begun, default=None)

    def _describe(self, run: RunFacts, file: ResultFile) -> None:
        values = {
            "global_batch_size": self.benchmark.global_batch(run),
            "gradient_accumulation_steps": run.trainer.accumulate_grad_batches,
            **({} if self.seed is None else {"seed": self.seed}),
            **self.benchmark.hyperparameters(run),
        }
        for key, value in values.items():
            file.event(key, value)
        for name in self.benchmark.tensors(run):
            file.event("weights_initialization", tensor=name)

    def _epoch_num(self, trainer: pl.Trainer) -> float:
        if self.benchmark.progress == "samples":
            return self._samples
        if epoch_is_complete(trainer):
            return trainer.current_epoch + 1
        done: float = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return round(trainer.current_epoch + done / trainer.num_training_batches, 6)

    def _end_epoch(self) -> None:
        if self._file is None or self._epoch is None:
            return
        if self._since is not None:  # no evaluation ends this epoch
            now = time.perf_counter()
            self._trained_seconds, self._since = self._trained_seconds + now - self._since, now
        epoch, self._epoch = self._epoch, None
        self._file.event("epoch_stop", epoch_num=epoch)
        self._tell_throughput(epoch)

    def _tell_throughput(self, step: int) -> None:
        """Tell the samples a second since the last time, of all processes and without evaluations."""
        if self._file is not None and self._trained_seconds > 0:
            rate = (self._samples - self._samples_before) / self._trained_seconds
            self._file.event("tracked_stats", {"throughput": round(rate, 3)}, step=step)
        self._samples_before, self._trained_seconds = self._samples, 0.0

    def _stop(self, status: str, **metadata: Any) -> None:
        file, self._file = self._file, None
        if file is None or self._count is None:
            return
        if self.benchmark.progress == "samples":
            file.event("block_stop", first_epoch_num=1)
            file.event("train_samples", self._samples)
        file.event("run_stop", status=status, **metadata)
        file.close()
        self.status = status

    def _release(self) -> None:
        while self._put_back:
            self._put_back.pop()()
        self._file = None


def _facts(trainer: pl.Trainer, module: pl.LightningModule) -> RunFacts:
    return RunFacts(trainer, module, getattr(trainer, "datamodule", None))


def _reads_when_asked(loader: Any) -> bool:
    """Whether making a loader's iterator reads nothing yet; of one without a length Lightning fetches a batch ahead."""
    return isinstance(loader, Resumable) or (
        getattr(loader, "num_workers", None) == 0 and sized_len(loader) is not None
    )
