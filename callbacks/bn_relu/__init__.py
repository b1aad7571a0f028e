"""Batch normalization in training, fused with ReLU and the residual addition."""

from fasttrain.callbacks.bn_relu.fused import (
    batch_norm_add_relu,
    batch_norm_dual_relu,
    batch_norm_relu,
    batch_norm_relu_pool,
    twin,
)
from fasttrain.callbacks.bn_relu.optimization import BNReLUOptimization, FusedBNReLU
from fasttrain.callbacks.bn_relu.sites import BNReLUPatches, BNReLUSurgery

__all__ = [
    "BNReLUOptimization",
    "BNReLUPatches",
    "BNReLUSurgery",
    "FusedBNReLU",
    "batch_norm_add_relu",
    "batch_norm_dual_relu",
    "batch_norm_relu",
    "batch_norm_relu_pool",
    "twin",
]
