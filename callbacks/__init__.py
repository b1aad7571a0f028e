"""The catalogue: every optimization by name, and the classes that a user's own project imports."""

from typing import Any

from fasttrain.callbacks.channels_last import ChannelsLast, ChannelsLastOptimization
from fasttrain.callbacks.precision import PrecisionOptimization, fastest_precision
from fasttrain.optimization import Optimization

CATALOGUE: dict[str, type[Optimization[Any]]] = {
    "channels_last": ChannelsLastOptimization,
    "precision": PrecisionOptimization,
}

__all__ = ["CATALOGUE", "ChannelsLast", "ChannelsLastOptimization", "PrecisionOptimization", "fastest_precision"]
