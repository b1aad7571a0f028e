"""The fastest precision of the matrix units that this device has, chosen by timing the training step."""

from fasttrain.callbacks.precision.choice import Candidate, candidates_for, fastest_precision
from fasttrain.callbacks.precision.optimization import PrecisionConfig, PrecisionOptimization

__all__ = ["Candidate", "PrecisionConfig", "PrecisionOptimization", "candidates_for", "fastest_precision"]
