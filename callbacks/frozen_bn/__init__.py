"""Frozen batch normalization folded once, and fused with ReLU and the residual addition."""

from fasttrain.callbacks.folded_norm import Folded, ScaleBias, fold
from fasttrain.callbacks.frozen_bn.fused import scale_bias_add_relu, scale_bias_dual_relu, scale_bias_relu, twin
from fasttrain.callbacks.frozen_bn.optimization import FrozenBNConfig, FrozenBNOptimization, FusedFrozenBN
from fasttrain.callbacks.frozen_bn.sites import FrozenBNSurgery

__all__ = [
    "Folded",
    "FrozenBNConfig",
    "FrozenBNOptimization",
    "FrozenBNSurgery",
    "FusedFrozenBN",
    "ScaleBias",
    "fold",
    "scale_bias_add_relu",
    "scale_bias_dual_relu",
    "scale_bias_relu",
    "twin",
]
