"""An evaluation's batches kept on the device, once its loader has been seen to make the same ones again."""

from fasttrain.callbacks.evaluation_cache.callback import EvaluationCache, EvaluationCacheConfig
from fasttrain.callbacks.evaluation_cache.optimization import EvaluationCacheOptimization

__all__ = ["EvaluationCache", "EvaluationCacheConfig", "EvaluationCacheOptimization"]
