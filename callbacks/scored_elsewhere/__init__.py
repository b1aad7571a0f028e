"""Evaluations that are scored elsewhere: a part of the rooms whose scores come late."""

from fasttrain.callbacks.scored_elsewhere.evaluation import NotScored, Outcome, Scored, Tag
from fasttrain.callbacks.scored_elsewhere.late_scoring import LateScoring
from fasttrain.callbacks.scored_elsewhere.rows import KeepsRows
from fasttrain.callbacks.scored_elsewhere.scorer import AsyncScorer

__all__ = ["AsyncScorer", "KeepsRows", "LateScoring", "NotScored", "Outcome", "Scored", "Tag"]
