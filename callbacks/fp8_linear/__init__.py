"""Linear layers whose matrix products are of 8-bit floating-point numbers."""

from fasttrain.callbacks.fp8_linear.functions import fp8_feed_forward, fp8_linear
from fasttrain.callbacks.fp8_linear.modules import FP8JoinedLinear, FP8Linear, in_fp8
from fasttrain.callbacks.fp8_linear.optimization import FP8LinearConfig, FP8LinearOptimization, FP8Linears
from fasttrain.callbacks.fp8_linear.scaling import Scales, Scaling, no_scales
from fasttrain.callbacks.fp8_linear.sites import FP8Patches

__all__ = [
    "FP8JoinedLinear",
    "FP8Linear",
    "FP8LinearConfig",
    "FP8LinearOptimization",
    "FP8Linears",
    "FP8Patches",
    "Scales",
    "Scaling",
    "fp8_feed_forward",
    "fp8_linear",
    "in_fp8",
    "no_scales",
]
