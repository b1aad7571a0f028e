"""Convolutions in channels_last (NHWC) memory format: the model's weights and the batches it is fed."""

from fasttrain.callbacks.channels_last.layout import batch_to_channels_last, to_channels_last
from fasttrain.callbacks.channels_last.optimization import ChannelsLast, ChannelsLastConfig, ChannelsLastOptimization

__all__ = [
    "ChannelsLast",
    "ChannelsLastConfig",
    "ChannelsLastOptimization",
    "batch_to_channels_last",
    "to_channels_last",
]
