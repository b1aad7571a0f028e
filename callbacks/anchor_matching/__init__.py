"""Anchors matched with an image's real boxes alone, in three launches, to the same bits."""

from fasttrain.callbacks.anchor_matching.matcher import FusedAnchorMatcher, match_anchors
from fasttrain.callbacks.anchor_matching.optimization import (
    AnchorMatchingConfig,
    AnchorMatchingOptimization,
    FusedAnchorMatching,
)

__all__ = [
    "AnchorMatchingConfig",
    "AnchorMatchingOptimization",
    "FusedAnchorMatcher",
    "FusedAnchorMatching",
    "match_anchors",
]
