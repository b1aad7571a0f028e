"""Dropout, residual addition and layer normalization in one pass."""

from fasttrain.callbacks.layer_norm_dropout.fused import dropout_add_layer_norm, twin
from fasttrain.callbacks.layer_norm_dropout.mask import draw_seed, keep_mask
from fasttrain.callbacks.layer_norm_dropout.modules import DropoutAddLayerNorm
from fasttrain.callbacks.layer_norm_dropout.optimization import FusedDropoutAddLayerNorm, LayerNormDropoutOptimization
from fasttrain.callbacks.layer_norm_dropout.sites import LayerNormDropoutPatches

__all__ = [
    "DropoutAddLayerNorm",
    "FusedDropoutAddLayerNorm",
    "LayerNormDropoutOptimization",
    "LayerNormDropoutPatches",
    "draw_seed",
    "dropout_add_layer_norm",
    "keep_mask",
    "twin",
]
