"""Scoring in a process of its own: training goes on while an evaluation's metric is computed."""

from fasttrain.callbacks.async_scoring.callback import AsyncCOCOScoring
from fasttrain.callbacks.async_scoring.config import AsyncScoringConfig
from fasttrain.callbacks.async_scoring.optimization import AsyncScoringOptimization
from fasttrain.callbacks.scored_elsewhere.evaluation import NotScored, Outcome, Scored, Tag
from fasttrain.callbacks.scored_elsewhere.rows import KeepsRows
from fasttrain.callbacks.scored_elsewhere.scorer import AsyncScorer

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
