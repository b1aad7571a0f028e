"""Training batches moved to the device ahead of the step, on a stream beside it."""

from fasttrain.callbacks.device_prefetch.any_loop import DeviceBatches
from fasttrain.callbacks.device_prefetch.optimization import (
    DevicePrefetchConfig,
    DevicePrefetcher,
    DevicePrefetchOptimization,
)

__all__ = ["DeviceBatches", "DevicePrefetchConfig", "DevicePrefetchOptimization", "DevicePrefetcher"]
