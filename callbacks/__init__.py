"""The catalogue: every optimization by name, and the classes that a user's own project imports."""

from typing import Any

from fasttrain.callbacks.channels_last import ChannelsLast, ChannelsLastOptimization
from fasttrain.callbacks.cuda_graph_step import CapturedFunction, CUDAGraphStep, CUDAGraphStepOptimization
from fasttrain.callbacks.precision import PrecisionOptimization, fastest_precision
from fasttrain.optimization import Optimization

CATALOGUE: dict[str, type[Optimization[Any]]] = {
    "channels_last": ChannelsLastOptimization,
    "cuda_graph_step": CUDAGraphStepOptimization,
    "precision": PrecisionOptimization,
}

__all__ = [
    "CATALOGUE",
    "CUDAGraphStep",
    "CUDAGraphStepOptimization",
    "CapturedFunction",
    "ChannelsLast",
    "ChannelsLastOptimization",
    "PrecisionOptimization",
    "fastest_precision",
]
