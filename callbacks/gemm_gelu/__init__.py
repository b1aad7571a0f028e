"""A transformer's feed-forward block with GELU inside of its matrix products."""

from fasttrain.callbacks.gemm_gelu.feed_forward import linear_gelu_linear
from fasttrain.callbacks.gemm_gelu.modules import FeedForward, FusedSequential
from fasttrain.callbacks.gemm_gelu.optimization import FusedGemmGELU, GemmGELUConfig, GemmGELUOptimization
from fasttrain.callbacks.gemm_gelu.sites import FeedForwardPatches

__all__ = [
    "FeedForward",
    "FeedForwardPatches",
    "FusedGemmGELU",
    "FusedSequential",
    "GemmGELUConfig",
    "GemmGELUOptimization",
    "linear_gelu_linear",
]
