"""The plan's door to the graph step."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from fasttrain.callback_door import CallbackOptimization
from fasttrain.callbacks.cuda_graph_step.callback import CUDAGraphStep
from fasttrain.callbacks.cuda_graph_step.config import CUDAGraphStepConfig
from fasttrain.callbacks.cuda_graph_step.decide import why_no_step_can_be_captured
from fasttrain.errors import OptimizationError
from fasttrain.optimization import Applies, Change, Context, Refuses, Stage, Verdict


class CUDAGraphStepOptimization(CallbackOptimization[CUDAGraphStepConfig, CUDAGraphStep]):
    """Captures the training step once everything else is in place."""

    name: ClassVar[str] = "cuda_graph_step"
    summary: ClassVar[str] = "the whole training step captured as a CUDA graph and replayed"
    config_class: ClassVar[type[Any]] = CUDAGraphStepConfig
    stage: ClassVar[Stage] = Stage.CAPTURE
    grade = "same numbers"

    def make_callback(self) -> CUDAGraphStep:
        """Return the callback, with the configuration as its parameters."""
        return CUDAGraphStep(**vars(self.config))

    def check(self, context: Context) -> Verdict:
        """Refuse where there are no CUDA graphs, or where the step's code tells that it can't be captured."""
        device = torch.device(context.hardware.device).type
        if device != "cuda" or torch.version.cuda is None:
            return Refuses(f"the run is on {context.hardware.name or device}, and CUDA graphs need an NVIDIA GPU")
        reason = why_no_step_can_be_captured(context.module, self.config.trusted)
        if reason is not None:
            return Refuses(reason)
        what = "forward and backward" if self.config.scope == "fwd_bwd" else "the whole step"
        return Applies(f"{what} captured after {self.config.warm_up} eager steps, and checked against an eager one")

    def applied(self) -> Sequence[Change]:
        """Return what is captured.

        Raises:
            OptimizationError: nothing is, for a reason that showed only with the Trainer: a hook, the strategy.
        """
        if self.callback.refusal is not None:
            raise OptimizationError(
                f"cuda_graph_step was to be applied and can't be, since {self.callback.refusal}. Leave it out: "
                "optimizations.cuda_graph_step=false."
            )
        return super().applied()
