"""LAMB and LARS as multi-tensor, capturable optimizers, and torch's fused steps for SGD, Adam and AdamW."""

from fasttrain.callbacks.optimizers.groups import is_bias_or_norm, parameter_groups
from fasttrain.callbacks.optimizers.lamb import LAMB, lamb_
from fasttrain.callbacks.optimizers.lars import LARS, lars_
from fasttrain.callbacks.optimizers.optimization import (
    FusedOptimizers,
    FusedOptimizersConfig,
    FusedOptimizersOptimization,
)

__all__ = [
    "LAMB",
    "LARS",
    "FusedOptimizers",
    "FusedOptimizersConfig",
    "FusedOptimizersOptimization",
    "is_bias_or_norm",
    "lamb_",
    "lars_",
    "parameter_groups",
]
