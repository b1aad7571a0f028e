"""Sigmoid focal loss over the levels of a feature pyramid: one pass that yields loss and gradient."""

from fasttrain.callbacks.focal_loss.loss import FocalLoss, sigmoid_focal_loss
from fasttrain.callbacks.focal_loss.optimization import FocalLossConfig, FocalLossOptimization, FusedFocalLoss

__all__ = ["FocalLoss", "FocalLossConfig", "FocalLossOptimization", "FusedFocalLoss", "sigmoid_focal_loss"]
