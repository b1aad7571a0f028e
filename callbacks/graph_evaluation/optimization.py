"""The plan's door to captured evaluations."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from fasttrain.callback_door import CallbackOptimization
from fasttrain.callbacks.graph_evaluation.callback import GraphedEvaluation, GraphEvaluationConfig
from fasttrain.callbacks.graph_evaluation.places import places, why_none
from fasttrain.optimization import Applies, Context, Refuses, Stage, Verdict


class GraphEvaluationOptimization(CallbackOptimization[GraphEvaluationConfig, GraphedEvaluation]):
    """Captures evaluations once everything else is in place."""

    name: ClassVar[str] = "graph_evaluation"
    summary: ClassVar[str] = "the device's part of an evaluation step captured as a CUDA graph and replayed"
    config_class: ClassVar[type[Any]] = GraphEvaluationConfig
    stage: ClassVar[Stage] = Stage.CAPTURE
    conflicts: ClassVar[Mapping[str, str]] = {
        "evaluation_ranks": "those run the module's own validation, to which no callback comes"
    }
    grade = "same numbers"

    def make_callback(self) -> GraphedEvaluation:
        """Return the callback, with the configuration as its parameters."""
        return GraphedEvaluation(**vars(self.config))

    def check(self, context: Context) -> Verdict:
        """Refuse where there are no CUDA graphs or nothing to capture."""
        found = places(context.module)
        if not found:
            return Refuses(why_none(context.module))
        device = torch.device(context.hardware.device).type
        if device != "cuda" or torch.version.cuda is None:
            return Refuses(f"the run is on {context.hardware.name or device}, and CUDA graphs need an NVIDIA GPU")
        names = ", ".join(place.path for place in found)
        return Applies(f"{names}, captured for each batch shape after two eager calls, checked against an eager one")
