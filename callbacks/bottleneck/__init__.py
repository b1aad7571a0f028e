"""A stage of frozen bottleneck blocks as one function: fused convolutions forward, data gradients first."""

from fasttrain.callbacks.bottleneck.optimization import BottleneckConfig, BottleneckOptimization, FusedBottlenecks
from fasttrain.callbacks.bottleneck.sites import BottleneckPatches, BottleneckSurgery, fused_stage
from fasttrain.callbacks.bottleneck.stage import FusedStage

__all__ = [
    "BottleneckConfig",
    "BottleneckOptimization",
    "BottleneckPatches",
    "BottleneckSurgery",
    "FusedBottlenecks",
    "FusedStage",
    "fused_stage",
]
