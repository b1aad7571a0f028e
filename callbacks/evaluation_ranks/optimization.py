"""The plan's door to dedicated evaluation ranks."""

from collections.abc import Mapping
from typing import Any, ClassVar

from fasttrain.callback_door import CallbackOptimization
from fasttrain.callbacks.evaluation_ranks.callback import EvaluationRanks
from fasttrain.callbacks.evaluation_ranks.config import EvaluationRanksConfig
from fasttrain.callbacks.scored_elsewhere.rows import KeepsRows, why_not
from fasttrain.optimization import Applies, Attachment, Context, Refuses, Stage, Verdict


class EvaluationRanksOptimization(CallbackOptimization[EvaluationRanksConfig, EvaluationRanks]):
    """Has the last processes of a run evaluate."""

    name: ClassVar[str] = "evaluation_ranks"
    summary: ClassVar[str] = "some processes evaluate the others' weights, while those go on training"
    config_class: ClassVar[type[Any]] = EvaluationRanksConfig
    stage: ClassVar[Stage] = Stage.CALLBACK
    grade = "same numbers"
    conflicts: ClassVar[Mapping[str, str]] = {"async_scoring": "each takes the module's evaluation over"}

    def make_callback(self) -> EvaluationRanks:
        """Return the callback, with the configuration as its parameters."""
        return EvaluationRanks(**vars(self.config))

    def check(self, context: Context) -> Verdict:
        """Refuse where no process would be left to train, or the module does not hand out what it found."""
        if context.processes <= self.config.eval_ranks:
            return Refuses(
                f"this run has {context.processes} process{'es' if context.processes > 1 else ''} and needs several "
                f"processes: {self.config.eval_ranks} to evaluate and at least one to train; set trainer.devices"
            )
        if not isinstance(context.module, KeepsRows):
            return Refuses(why_not(context.module))
        return Applies(f"{context.processes - self.config.eval_ranks} of {context.processes} processes train")

    def attach(self, context: Context) -> Attachment:
        """Hand over the callback and its strategy."""
        return Attachment(callbacks=[self.callback], trainer_options={"strategy": self.callback.strategy})
