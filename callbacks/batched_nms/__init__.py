"""Non-maximum suppression of each class for a whole batch in one kernel, without a wait, to torchvision's choice."""

from fasttrain.callbacks.batched_nms.optimization import (
    BatchedNMSConfig,
    BatchedNMSOptimization,
    FusedBatchedNMS,
)
from fasttrain.callbacks.batched_nms.suppression import BatchedSuppression, batched_nms

__all__ = ["BatchedNMSConfig", "BatchedNMSOptimization", "BatchedSuppression", "FusedBatchedNMS", "batched_nms"]
