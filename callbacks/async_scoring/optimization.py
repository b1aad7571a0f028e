"""The plan's door to scoring beside training."""

import sys
from typing import Any, ClassVar

from fasttrain.callback_door import CallbackOptimization
from fasttrain.callbacks.async_scoring.callback import AsyncCOCOScoring
from fasttrain.callbacks.async_scoring.config import AsyncScoringConfig
from fasttrain.callbacks.scored_elsewhere.rows import KeepsRows, why_not
from fasttrain.optimization import Applies, Context, Refuses, Stage, Verdict


class AsyncScoringOptimization(CallbackOptimization[AsyncScoringConfig, AsyncCOCOScoring]):
    """Scores evaluations in a process of its own."""

    name: ClassVar[str] = "async_scoring"
    summary: ClassVar[str] = "evaluations scored in another process, while training goes on"
    config_class: ClassVar[type[Any]] = AsyncScoringConfig
    stage: ClassVar[Stage] = Stage.CALLBACK
    grade = "same numbers"

    def make_callback(self) -> AsyncCOCOScoring:
        """Return the callback, with the configuration as its parameters."""
        return AsyncCOCOScoring(**vars(self.config))

    def check(self, context: Context) -> Verdict:
        """Refuse where the module does not hand out what it found."""
        if sys.platform == "win32":
            return Refuses("the rows go to the scoring process by file descriptors, which Windows does not pass on")
        if not isinstance(context.module, KeepsRows):
            return Refuses(why_not(context.module))
        return Applies("scores arrive while training goes on, under the step they belong to")
