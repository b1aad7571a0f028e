"""The device's part of an evaluation step as a CUDA graph: captured for each batch shape, checked and replayed."""

from fasttrain.callbacks.graph_evaluation.callback import GraphedEvaluation, GraphEvaluationConfig
from fasttrain.callbacks.graph_evaluation.optimization import GraphEvaluationOptimization

__all__ = ["GraphEvaluationConfig", "GraphEvaluationOptimization", "GraphedEvaluation"]
