"""Scoring in a process of its own: training goes on while an evaluation's metric is computed."""

from fasttrain.callbacks.async_scoring.callback import AsyncCOCOScoring
from fasttrain.callbacks.async_scoring.config import AsyncScoringConfig
from fasttrain.callbacks.async_scoring.evaluation import NotScored, Outcome, Scored, Tag
from fasttrain.callbacks.async_scoring.optimization import AsyncScoringOptimization
from fasttrain.callbacks.async_scoring.rows import KeepsRows
from fasttrain.callbacks.async_scoring.scorer import AsyncScorer

__all__ = [
    "AsyncCOCOScoring",
    "AsyncScorer",
    "AsyncScoringConfig",
    "AsyncScoringOptimization",
    "KeepsRows",
    "NotScored",
    "Outcome",
    "Scored",
    "Tag",
]
