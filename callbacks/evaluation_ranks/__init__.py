"""Dedicated evaluation ranks: some processes evaluate the others' weights, while those go on training."""

from fasttrain.callbacks.evaluation_ranks.callback import EvaluationRanks
from fasttrain.callbacks.evaluation_ranks.config import EvaluationRanksConfig
from fasttrain.callbacks.evaluation_ranks.evaluation_side import EvaluationSide
from fasttrain.callbacks.evaluation_ranks.optimization import EvaluationRanksOptimization
from fasttrain.callbacks.evaluation_ranks.roles import Roles, assign_roles
from fasttrain.callbacks.evaluation_ranks.schedule import WaitSchedule, share
from fasttrain.callbacks.evaluation_ranks.strategy import EvaluationRanksStrategy
from fasttrain.callbacks.evaluation_ranks.training_side import TrainingSide
from fasttrain.callbacks.evaluation_ranks.weights import FlatWeights

__all__ = [
    "EvaluationRanks",
    "EvaluationRanksConfig",
    "EvaluationRanksOptimization",
    "EvaluationRanksStrategy",
    "EvaluationSide",
    "FlatWeights",
    "Roles",
    "TrainingSide",
    "WaitSchedule",
    "assign_roles",
    "share",
]
