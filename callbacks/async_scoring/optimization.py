"""The plan's door to scoring beside training."""

import sys
from collections.abc import Sequence
from typing import Any, ClassVar

from fasttrain.callbacks.async_scoring.callback import AsyncCOCOScoring
from fasttrain.callbacks.async_scoring.config import AsyncScoringConfig
from fasttrain.callbacks.async_scoring.rows import KeepsRows, why_not
from fasttrain.optimization import Applies, Attachment, Change, Context, Optimization, Refuses, Stage, Table, Verdict


class AsyncScoringOptimization(Optimization[AsyncScoringConfig]):
    """Scores evaluations in a process of its own."""

    name: ClassVar[str] = "async_scoring"
    summary: ClassVar[str] = "evaluations scored in another process, while training goes on"
    config_class: ClassVar[type[Any]] = AsyncScoringConfig
    stage: ClassVar[Stage] = Stage.CALLBACK
    grade = "same numbers"

    def __init__(self, config: AsyncScoringConfig) -> None:
        super().__init__(config)
        self.callback = AsyncCOCOScoring(**vars(config))

    def check(self, context: Context) -> Verdict:
        """Refuse where the module does not hand out what it found."""
        if sys.platform == "win32":
            return Refuses("the rows go to the scoring process by file descriptors, which Windows does not pass on")
        if not isinstance(context.module, KeepsRows):
            return Refuses(why_not(context.module))
        return Applies("scores arrive while training goes on, under the step they belong to")

    def attach(self, context: Context) -> Attachment:
        """Hand over the callback."""
        return Attachment(callbacks=[self.callback])

    def applied(self) -> Sequence[Change]:
        """Return what is scored elsewhere; nothing in a run that never validates."""
        return self.callback.changes

    def outcome(self) -> Sequence[Table]:
        """Return when each evaluation was made and when its score arrived."""
        return [self.callback.table()]
