"""A transformer's feed-forward block as one function, with GELU's gradient inside of a matrix product."""

from fasttrain.callbacks.gemm_gelu.feed_forward import linear_gelu_linear
from fasttrain.callbacks.gemm_gelu.modules import FeedForward, FusedSequential
from fasttrain.callbacks.gemm_gelu.optimization import FusedGemmGELU, GemmGELUConfig, GemmGELUOptimization
from fasttrain.callbacks.gemm_gelu.sites import FeedForwardPatches
from fasttrain.callbacks.gemm_gelu.ways import Ways

__all__ = [
    "FeedForward",
    "FeedForwardPatches",
    "FusedGemmGELU",
    "FusedSequential",
    "GemmGELUConfig",
    "GemmGELUOptimization",
    "Ways",
    "linear_gelu_linear",
]
