"""Chains of linear layers and ReLUs as one function: bias and ReLU in the products, weight gradients beside."""

from fasttrain.callbacks.gemm_relu.fused import linear_relu_chain
from fasttrain.callbacks.gemm_relu.modules import FusedMLP, fused_mlp
from fasttrain.callbacks.gemm_relu.optimization import FusedGemmReLU, GemmReLUConfig, GemmReLUOptimization
from fasttrain.callbacks.gemm_relu.sites import MLPPatches

__all__ = [
    "FusedGemmReLU",
    "FusedMLP",
    "GemmReLUConfig",
    "GemmReLUOptimization",
    "MLPPatches",
    "fused_mlp",
    "linear_relu_chain",
]
