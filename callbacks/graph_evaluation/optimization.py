"""The plan's door to captured evaluations."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from fasttrain.callbacks.graph_evaluation.callback import GraphedEvaluation, GraphEvaluationConfig
from fasttrain.callbacks.graph_evaluation.places import places, why_none
from fasttrain.optimization import Applies, Attachment, Change, Context, Optimization, Refuses, Stage, Table, Verdict


class GraphEvaluationOptimization(Optimization[GraphEvaluationConfig]):
    """Captures evaluations once everything else is in place."""

    name: ClassVar[str] = "graph_evaluation"
    summary: ClassVar[str] = "the device's part of an evaluation step captured as a CUDA graph and replayed"
    config_class: ClassVar[type[Any]] = GraphEvaluationConfig
    stage: ClassVar[Stage] = Stage.CAPTURE
    conflicts: ClassVar[Mapping[str, str]] = {
        "evaluation_ranks": "those run the module's own validation, to which no callback comes"
    }
    grade = "same numbers"

    def __init__(self, config: GraphEvaluationConfig) -> None:
        super().__init__(config)
        self.callback = GraphedEvaluation(**vars(config))

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

    def attach(self, context: Context) -> Attachment:
        """Hand over the callback."""
        return Attachment(callbacks=[self.callback])

    def applied(self) -> Sequence[Change]:
        """Return what is captured; nothing in a run that never validates."""
        return self.callback.changes

    def outcome(self) -> Sequence[Table]:
        """Return the table of replays, eager calls and captures."""
        return [self.callback.table()]
