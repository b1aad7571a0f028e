"""Convolution with bias and ReLU fused, and their gradients taken in one pass."""

from fasttrain.callbacks.conv_bias_relu.conv import conv_bias, conv_bias_relu
from fasttrain.callbacks.conv_bias_relu.optimization import (
    ConvBiasReLUConfig,
    ConvBiasReLUOptimization,
    FusedConvBiasReLU,
)
from fasttrain.callbacks.conv_bias_relu.sites import ConvBiasReLUPatches

__all__ = [
    "ConvBiasReLUConfig",
    "ConvBiasReLUOptimization",
    "ConvBiasReLUPatches",
    "FusedConvBiasReLU",
    "conv_bias",
    "conv_bias_relu",
]
