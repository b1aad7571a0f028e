"""`EvaluationRanks`: the last processes of a Lightning run evaluate what the others hand over, while those go on."""

from dataclasses import asdict, dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from fasttrain.callbacks.evaluation_ranks.config import EvaluationRanksConfig
from fasttrain.callbacks.evaluation_ranks.evaluation_side import EvaluationSide, Rows
from fasttrain.callbacks.evaluation_ranks.schedule import WaitSchedule
from fasttrain.callbacks.evaluation_ranks.strategy import (
    EvaluationRanksStrategy,
    batches_between_validations,
    put_back,
    replace_training,
    replace_validation,
    share_validation,
    validate_once,
)
from fasttrain.callbacks.evaluation_ranks.training_side import TrainingSide, told
from fasttrain.callbacks.scored_elsewhere.evaluation import Scored, Tag
from fasttrain.callbacks.scored_elsewhere.late_scoring import LateScoring
from fasttrain.callbacks.scored_elsewhere.rows import KeepsRows, why_not
from fasttrain.errors import OptimizationError
from fasttrain.optimization import Change, Table
from fasttrain.trainer import logging_step

COLUMNS = ("step", "epoch", "handed over (s)", "score taken (s)", "batches later", "scoring (s)")


@dataclass
class _Evaluation:
    """Where an evaluation's scores belong, and when things happened, in seconds since the fit began."""

    tag: Tag
    logging_step: int
    handed_over_seconds: float
    taken_seconds: float = float("nan")
    batches_later: int = 0
    scoring_seconds: float = float("nan")


class EvaluationRanks(LateScoring):
    """Dedicated evaluation ranks: `Trainer(devices=8, strategy=ranks.strategy, callbacks=[ranks])`.

    Where Lightning would validate, the training ranks hand over their weights and go on. The evaluation ranks run the
    module's validation with them; the scores come back to all training ranks at the same step, are logged under the
    step that was evaluated, and `StopAtTarget` and `ModelCheckpoint` count from there.

    Args:
        parameters: those of `EvaluationRanksConfig`.

    Raises:
        OptimizationError: at `setup`, when the module doesn't offer what `KeepsRows` asks for, or the Trainer has
            another strategy; during a fit, when a rank is gone, or an evaluation failed.
    """

    def __init__(self, **parameters: Any) -> None:
        super().__init__()
        self.config = EvaluationRanksConfig(**parameters)
        unused = {"find_unused_parameters": True} if self.config.find_unused_parameters else {}
        self.strategy = EvaluationRanksStrategy(self.config, **unused)
        """For the Trainer."""
        self._evaluations: list[_Evaluation] = []
        self._training: TrainingSide | None = None
        self._evaluation: EvaluationSide | None = None
        self._batches = 0
        self._rows: Rows = []

    # ---- begin and end of a fit --------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take this process's role."""
        if stage != "fit":
            return
        if not isinstance(pl_module, KeepsRows):
            raise OptimizationError(f"evaluation_ranks: {why_not(pl_module)}; leave it out.")
        strategy = trainer.strategy
        if not isinstance(strategy, EvaluationRanksStrategy) or strategy.roles is None:
            raise OptimizationError(
                f"evaluation_ranks: the Trainer's strategy is {type(strategy).__name__}; give it the callback's own: "
                "Trainer(strategy=ranks.strategy, callbacks=[ranks])."
            )
        if strategy.roles.trains:
            replace_validation(trainer, lambda: self._hand_over(trainer, pl_module))
        else:
            share_validation(trainer, strategy)
            replace_training(trainer, lambda: self._serve(trainer))
            self._keep_rows(trainer, pl_module)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make this process's side, now that the module is on its device."""
        strategy, config = trainer.strategy, self.config
        assert isinstance(strategy, EvaluationRanksStrategy)
        assert strategy.roles is not None
        assert isinstance(pl_module, KeepsRows)
        roles = strategy.roles
        self._begin()
        if not roles.trains:
            truth = pl_module.ground_truth() if roles.role_rank == 0 else None
            self._evaluation = EvaluationSide(
                roles, pl_module, pl_module.score_function(), truth,
                timeout_seconds=config.timeout_seconds, threads=config.threads,
            )  # fmt: skip
            return
        schedule = WaitSchedule(config.early_wait, config.early_epochs, config.late_wait)
        self._training = TrainingSide(roles, pl_module, schedule, config.timeout_seconds)
        self._watch(trainer, trainer.is_global_zero)
        if trainer.enable_validation:
            self.changes = [Change("validation", "handed over to ranks of its own", roles.evaluation)]

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the score that is still out, and let the evaluation ranks end."""
        if self._training is None:
            return
        self._take(trainer, self._training.collect())
        self._training.finish()
        self._show_last(trainer)
        self._release(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give Lightning its loops again."""
        self._release(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Take the other ranks down; Lightning calls nothing else then."""
        roles = getattr(trainer.strategy, "roles", None)
        if self._training is not None:
            self._training.abandon(exception)
        elif roles is not None:  # before there was a side; that of an evaluation rank has told it already
            roles.board.tell_fault(told(exception))
        self._release(trainer)

    # ---- the training ranks ------------------------------------------------------------------------------------------

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take the score that is out, where that is due."""
        if self._training is not None:
            self._batches += 1
            self._take(trainer, self._training.after_batch())

    def _hand_over(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Do what a validation is on a training rank: the callbacks' hooks, and within them a copy of the weights.

        Callbacks that put averaged weights in the model's place for a validation do so here.
        """
        assert self._training is not None
        stopping = trainer.should_stop
        self._take(trainer, self._training.collect())
        if trainer.should_stop and not stopping:  # by that score
            return
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            callback.on_validation_start(trainer, pl_module)
        for callback in callbacks:
            callback.on_validation_epoch_start(trainer, pl_module)
        tag = Tag(trainer.global_step, trainer.current_epoch, len(self._evaluations))
        self._evaluations.append(_Evaluation(tag, logging_step(trainer), self.seconds, batches_later=self._batches))
        self._expect(trainer, tag)
        self._training.hand_over(tag, batches_between_validations(trainer))
        for callback in callbacks:
            callback.on_validation_epoch_end(trainer, pl_module)
        for callback in callbacks:
            callback.on_validation_end(trainer, pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse those who can't wait for a score."""
        self._refuse_the_impatient(trainer, "evaluation_ranks", "training ranks don't know when an evaluation begins")

    def _take(self, trainer: pl.Trainer, scored: Scored | None) -> None:
        if scored is None:
            return
        evaluation = next(e for e in self._evaluations if e.tag == scored.tag)
        evaluation.taken_seconds, evaluation.scoring_seconds = self.seconds, scored.seconds
        evaluation.batches_later = self._batches - evaluation.batches_later
        for fault in scored.faults:
            rank_zero_warn(f"scoring {scored.tag}: {fault}; it was scored at the second attempt.")
        self._log(trainer, scored, evaluation.logging_step, evaluation.handed_over_seconds, evaluation.taken_seconds)
        name, value = next(iter(scored.scores.items()))
        rank_zero_info(f"{scored.tag}: {name} {value:.4f}, taken {evaluation.batches_later} batches later")
        self._tell(trainer, scored)

    # ---- the evaluation ranks ----------------------------------------------------------------------------------------

    def _keep_rows(self, trainer: pl.Trainer, pl_module: Any) -> None:
        def on_validation_epoch_end() -> None:
            self._rows = pl_module.validation_rows()

        pl_module.on_validation_epoch_end = on_validation_epoch_end

    def _serve(self, trainer: pl.Trainer) -> None:
        assert self._evaluation is not None

        def evaluate(tag: Tag) -> Rows:
            validate_once(trainer, tag.step, tag.epoch)
            rows, self._rows = self._rows, []
            return rows

        self._evaluation.serve(evaluate)

    # ---- what is told and kept ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the evaluations so far, and which one's score is still out."""
        pending = self._training.pending if self._training is not None else None
        taken = [asdict(evaluation) for evaluation in self._evaluations if evaluation.tag != pending]
        return {"seconds": self.seconds, "evaluations": taken, "pending": str(pending) if pending else None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there, and say what can't be made good: the weights that were out are in no checkpoint."""
        self._seconds_before = float(state_dict["seconds"])
        self._evaluations = [_Evaluation(**{**each, "tag": Tag(**each["tag"])}) for each in state_dict["evaluations"]]
        if state_dict["pending"]:
            rank_zero_warn(
                f"evaluation_ranks: the score of {state_dict['pending']} was still out when the checkpoint was "
                "written; it is in the log if the run went on after that, and is not made again."
            )

    def table(self) -> Table:
        """Return when weights were handed over and their scores taken."""
        rows = [
            (e.tag.step, e.tag.epoch, round(e.handed_over_seconds, 3), round(e.taken_seconds, 3), e.batches_later,
             round(e.scoring_seconds, 3))
            for e in self._evaluations if e.taken_seconds == e.taken_seconds
        ]  # fmt: skip
        note = "nothing was handed over"
        if self._training is not None:
            note = (
                f"training stood still for {self._training.handing_over_seconds:.3f} s to hand over and "
                f"{self._training.waited_seconds:.3f} s to wait for scores; ranks that did not train: "
                f"{self.config.eval_ranks}"
            )
        return Table("evaluations by dedicated ranks", COLUMNS, rows, note)

    def _release(self, trainer: pl.Trainer) -> None:
        self._stop_watching()
        put_back(trainer)
        module = trainer.lightning_module
        if module is not None:
            vars(module).pop("on_validation_epoch_end", None)
