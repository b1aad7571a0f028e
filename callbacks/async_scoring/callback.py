"""`AsyncCOCOScoring`: hands a module's detections to a scoring process, and the scores back to whom they concern."""

import time
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from numpy.typing import NDArray

from fasttrain.callbacks.async_scoring.config import AsyncScoringConfig
from fasttrain.callbacks.async_scoring.each_image_once import check_padding, leave_out_padding
from fasttrain.callbacks.async_scoring.history import Evaluation, plain_rows, rows_of, table_of
from fasttrain.callbacks.async_scoring.ranks import OneProcess, Ranks, SeveralProcesses
from fasttrain.callbacks.scored_elsewhere.evaluation import NotScored, Outcome, Tag
from fasttrain.callbacks.scored_elsewhere.late_checkpoint import LateCheckpoint
from fasttrain.callbacks.scored_elsewhere.late_scoring import LateScoring
from fasttrain.callbacks.scored_elsewhere.late_target import LateTarget
from fasttrain.callbacks.scored_elsewhere.rows import KeepsRows, why_not
from fasttrain.callbacks.scored_elsewhere.scorer import AsyncScorer
from fasttrain.errors import OptimizationError
from fasttrain.optimization import Change, Table
from fasttrain.randomness import random_state, set_random_state
from fasttrain.trainer import logging_step, validation_is_due

BATCHES_BETWEEN_LOOKS = 20
"""Of several ranks, unless configured otherwise; in one process every batch."""
PROGRESS_SECONDS = 10.0
"""Between two lines of progress, and between two signs of life for ranks that wait for the first."""


class AsyncCOCOScoring(LateScoring):
    """Scores evaluations while training goes on: `Trainer(callbacks=[AsyncCOCOScoring()])`.

    In a fit it takes the place of the module's `on_validation_epoch_end`. The scores are logged under the step that was
    evaluated, `StopAtTarget` counts from there, and a `ModelCheckpoint` that monitors one of them keeps the weights of
    then. At the end of the fit what is still being scored is waited for. Training's random state is what it is
    without evaluation. Of several ranks the first scores the rows of all, and all take a score at the same step.

    Args:
        parameters: those of `AsyncScoringConfig`.

    Raises:
        OptimizationError: at `setup`, when the module doesn't offer what `KeepsRows` asks for; at the end of a fit,
            when an evaluation could not be scored and `on_failure` is "error".
    """

    def __init__(self, **parameters: Any) -> None:
        super().__init__()
        self.config = AsyncScoringConfig(**parameters)
        self.stalled_seconds = 0.0
        """Of training's thread, spent on handing over, waiting for room or the slowest rank, and taking scores."""
        self._evaluations: list[Evaluation] = []
        self._lost: list[NotScored] = []
        self._ranks: Ranks | None = None  # where there is something to score
        self._scorer: AsyncScorer | None = None  # on the first rank
        self._module: pl.LightningModule | None = None
        self._random_state: dict[str, Any] | None = None
        self._unfinished: list[dict[str, Any]] = []  # of the run that is resumed

    # ---- begin and end of a fit --------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Look whether there is anything to score elsewhere."""
        if stage != "fit":
            return
        if not isinstance(pl_module, KeepsRows):
            raise OptimizationError(f"async_scoring: {why_not(pl_module)}; leave it out.")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the scoring process, and take the module's place in scoring."""
        if not trainer.enable_validation:
            return
        self._begin()
        self._lost = []
        ranks = self._ranks = SeveralProcesses() if trainer.world_size > 1 else OneProcess()
        ranks.first(lambda: self._start_scorer(pl_module))
        self._watch(trainer, ranks.is_first)
        self._take_over(trainer, pl_module)
        self._go_on_with_unfinished(trainer)
        self.changes = [Change("on_validation_epoch_end", "scored in a process of its own, while training goes on")]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """See that ranks evaluate each sample once."""
        if trainer.world_size > 1 and self._ranks is not None:
            leave_out_padding(trainer.val_dataloaders)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait for the scores that are still to come.

        Raises:
            OptimizationError: one never came, and `on_failure` is "error".
        """
        if self._ranks is None:
            return
        self._drain(trainer, self._ranks)
        self._ranks.close()
        self._show_last(trainer)
        self._close()
        if self._lost and self.config.on_failure == "error":
            raise OptimizationError(_lost_text(self._lost))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """End the process, if it is still there."""
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """The same; Lightning calls nothing else then."""
        self._close()

    # ---- during the fit ----------------------------------------------------------------------------------------------

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take scores that have arrived; before an evaluation, remember the random state."""
        if self._ranks is None:
            return
        usual = 1 if trainer.world_size == 1 else BATCHES_BETWEEN_LOOKS
        if batch_idx % (self.config.poll_every_n_batches or usual) == 0:
            self._poll(trainer, self._ranks)
        # Lightning makes the evaluation's loader, which draws a seed, before any hook of the evaluation.
        if validation_is_due(trainer):
            self._random_state = random_state()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the random state back, and refuse those who can't wait for a score."""
        if self._random_state is not None:
            set_random_state(self._random_state)
            self._random_state = None
        self._refuse_the_impatient(trainer, "async_scoring", "is not logged before its evaluation ends")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The evaluation before is over, where one follows another."""
        self._ending = None
        if trainer.world_size > 1 and self._ranks is not None and not trainer.sanity_checking:
            check_padding(trainer.val_dataloaders)

    # ---- what a checkpoint holds ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what was scored, and the rows that are not scored yet; the latter not for a best checkpoint."""
        saving_best = any(isinstance(watcher, LateCheckpoint) and watcher.saving for watcher in self._watchers)
        kept = self._scorer.unfinished() if self._scorer is not None and not saving_best else []
        unfinished = [
            {
                "evaluation": self._evaluation(tag).plain(),
                "rows": plain_rows(rows),
                "moments": [w.moment_of(tag) for w in self._watchers if isinstance(w, LateTarget)],
            }
            for tag, rows in kept
        ]
        waiting = {tag for tag, _ in kept}
        return {
            "seconds": self.seconds,
            "evaluations": [e.plain() for e in self._evaluations if e.tag not in waiting],
            "unfinished": unfinished,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there; rows are scored once training begins."""
        self._seconds_before = float(state_dict["seconds"])
        self._evaluations = [Evaluation.from_plain(values) for values in state_dict["evaluations"]]
        self._unfinished = list(state_dict["unfinished"])

    def table(self) -> Table:
        """Return what was evaluated when, and when its score arrived."""
        return table_of(self._evaluations, self.stalled_seconds, len(self._lost))

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _start_scorer(self, module: Any) -> None:
        config = self.config
        self._scorer = AsyncScorer(
            module.score_function(),
            module.ground_truth(),
            most_in_flight=config.most_in_flight,
            timeout_seconds=config.timeout_seconds,
            niceness=config.niceness,
            threads=config.threads,
            tell=rank_zero_warn,
        )

    def _take_over(self, trainer: pl.Trainer, pl_module: Any) -> None:
        def on_validation_epoch_end() -> None:
            rows = pl_module.validation_rows()
            if not trainer.sanity_checking:
                self._hand_over(trainer, rows)

        self._module = pl_module
        pl_module.on_validation_epoch_end = on_validation_epoch_end

    def _hand_over(self, trainer: pl.Trainer, parts: Sequence[NDArray[Any]]) -> None:
        ranks = self._ranks
        assert ranks is not None
        begun = time.perf_counter()
        tag = Tag(trainer.global_step, trainer.current_epoch, len(self._evaluations))
        self._evaluations.append(Evaluation(tag, logging_step(trainer), self.seconds))
        self._expect(trainer, tag)
        while not ranks.first(lambda: self._scoring.wait_for_room(tag, PROGRESS_SECONDS)):
            pass  # all ranks wait here, and not in the next step's collectives
        rows = ranks.gather(parts)
        if self._scorer is not None:
            self._scorer.submit(rows, tag)
        self.stalled_seconds += time.perf_counter() - begun

    @property
    def _scoring(self) -> AsyncScorer:
        assert self._scorer is not None, "the first rank has one"
        return self._scorer

    def _go_on_with_unfinished(self, trainer: pl.Trainer) -> None:
        for kept in self._unfinished:
            evaluation = Evaluation.from_plain(kept["evaluation"])
            self._evaluations.append(evaluation)
            for watcher in self._watchers:
                if isinstance(watcher, LateCheckpoint):
                    watcher.expect_from_before(evaluation.tag)
            targets = [watcher for watcher in self._watchers if isinstance(watcher, LateTarget)]
            for target, moment in zip(targets, kept["moments"], strict=False):
                target.expect(trainer, evaluation.tag, moment)
            if self._scorer is not None:
                self._scorer.submit(rows_of(kept["rows"]), evaluation.tag)
        self._unfinished = []

    def _poll(self, trainer: pl.Trainer, ranks: Ranks) -> None:
        begun = time.perf_counter()
        if count := ranks.announced(self._scorer.arrived if self._scorer is not None else 0):
            for outcome in ranks.first(lambda: self._scoring.poll(count)):
                self._take(trainer, outcome)
        self.stalled_seconds += time.perf_counter() - begun

    def _drain(self, trainer: pl.Trainer, ranks: Ranks) -> None:
        """Wait for all scores, with a line of progress now and then."""

        def wait(seconds: float) -> tuple[list[Outcome], int]:
            self._scoring.wait(seconds)
            outcomes = self._scoring.poll()
            return outcomes, self._scoring.outstanding

        begun, done, seconds = time.perf_counter(), 0, 0.0
        while True:
            outcomes, left = ranks.first(lambda: wait(seconds))  # noqa: B023 - it is called at once
            done, seconds = done + len(outcomes), PROGRESS_SECONDS
            if done + left:
                waited = time.perf_counter() - begun
                _say(trainer, f"scoring: {done} of {done + left} evaluations done after {waited:.0f} s")
            for outcome in outcomes:
                self._take(trainer, outcome)
            if not left:
                return

    def _evaluation(self, tag: Tag) -> Evaluation:
        return next(evaluation for evaluation in self._evaluations if evaluation.tag == tag)

    def _take(self, trainer: pl.Trainer, outcome: Outcome) -> None:
        evaluation = self._evaluation(outcome.tag)
        evaluation.scoring_seconds, evaluation.faults = outcome.seconds, len(outcome.faults)
        if isinstance(outcome, NotScored):
            self._lost.append(outcome)
            for watcher in self._watchers:
                watcher.forget(outcome.tag)
            return
        evaluation.arrived_seconds = self.seconds
        self._log(trainer, outcome, evaluation.logging_step, evaluation.evaluated_seconds, evaluation.arrived_seconds)
        name, value = next(iter(outcome.scores.items()))
        late = evaluation.arrived_seconds - evaluation.evaluated_seconds
        _say(trainer, f"{outcome.tag}: {name} {value:.4f}, known {late:.1f} s later")
        self._tell(trainer, outcome)

    def _close(self) -> None:
        if self._scorer is not None:
            self._scorer.close()
        self._scorer = self._ranks = None
        self._stop_watching()
        if self._module is not None:
            del self._module.on_validation_epoch_end
            self._module = None
        self._random_state = None


def _say(trainer: pl.Trainer, text: str) -> None:
    """Print a line, through the progress bar if that has a way to print without breaking itself."""
    if not trainer.is_global_zero:
        return
    bar = trainer.progress_bar_callback
    if bar is not None and type(bar).print is not ProgressBar.print:
        bar.print(text)
    else:
        rank_zero_info(text)


def _lost_text(lost: Sequence[NotScored]) -> str:
    first = lost[0]
    more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
    return (
        f"async_scoring: {first.tag} could not be scored{more}: {first.faults[-1]}, at the second attempt too. "
        "Training has ended and its checkpoints are kept; on_failure=continue makes this a warning."
    )
