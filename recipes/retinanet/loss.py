"""RetinaNet's two loss terms with static shapes: focal loss on the class logits, L1 on the box deltas.

Lin et al., "Focal Loss for Dense Object Detection" (arXiv 1708.02002), sections 3 and 4. Both terms equal those of
torchvision's RetinaNet, which picks the matched anchors out by boolean indexing; here masks and gathers do it, so the
shapes never depend on the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fasttrain.recipes.retinanet.matching import BETWEEN_THRESHOLDS

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def focal_loss(
    logits: Float[Tensor, "B A K"],
    labels: Int[Tensor, "B M"],
    matched: Int[Tensor, "B A"],
    alpha: float = 0.25,
    gamma: float = 2.0,
) -> Float[Tensor, ""]:
    """Return the sigmoid focal loss: per image over the number of foreground anchors (at least 1), mean over images.

    Computed in float32 whatever the dtype of `logits`.

    Args:
        logits: one per anchor and class.
        labels: class index of each box; may hold padding, which nothing in `matched` points to.
        matched: from `matching.match`.
        alpha: weight of the foreground class of a matched anchor; all other classes weigh 1 - alpha.
        gamma: focusing exponent.
    """
    return SigmoidFocalLoss(alpha, gamma).forward([logits], class_of_anchor(labels, matched))


class SigmoidFocalLoss(nn.Module):
    """`focal_loss` of logits level by level. An optimization that knows this role may put another in its place."""

    fasttrain_role = "sigmoid_focal_loss"

    def __init__(self, alpha: float, gamma: float) -> None:
        super().__init__()
        self.alpha, self.gamma = alpha, gamma

    def forward(self, levels: Sequence[Tensor], targets: Int[Tensor, "B A"]) -> Float[Tensor, ""]:
        """Return the loss of logits (B, anchors of the level, K), for targets from `class_of_anchor`."""
        return _focal_loss(torch.cat(list(levels), dim=1), targets, self.alpha, self.gamma)


def class_of_anchor(labels: Int[Tensor, "B M"], matched: Int[Tensor, "B A"]) -> Int[Tensor, "B A"]:
    """Return the class index of each anchor's box; BACKGROUND and BETWEEN_THRESHOLDS stay what they are."""
    return torch.where(matched >= 0, _take(labels, matched), matched)


def _focal_loss(logits: Tensor, targets: Tensor, alpha: float, gamma: float) -> Tensor:
    foreground = targets >= 0
    class_index = targets.clamp(min=0).unsqueeze(2)
    # The loss of a positive is that of a negative with the logit's sign turned and another weight. So the one logit
    # per foreground anchor is turned, and no dense one-hot target is needed.
    logits = logits.float()
    at_class = logits.gather(2, class_index)
    at_class = torch.where(foreground.unsqueeze(2), -at_class, at_class)
    negative = _focal(logits.scatter(2, class_index, at_class), gamma).sum(dim=2)
    weighted = (1 - alpha) * negative + torch.where(foreground, (2 * alpha - 1) * _focal(at_class, gamma).squeeze(2), 0)
    return _per_foreground(torch.where(targets != BETWEEN_THRESHOLDS, weighted, 0), foreground)


def box_loss(
    deltas: Float[Tensor, "B A 4"],
    anchors: Float[Tensor, "A 4"],
    boxes: Float[Tensor, "B M 4"],
    matched: Int[Tensor, "B A"],
) -> Float[Tensor, ""]:
    """Return the L1 loss of the foreground anchors' deltas, normalised as `focal_loss`, in float32."""
    foreground = matched >= 0
    # Other anchors are their own target: encoding a padding box would give log(0).
    target_boxes = torch.where(foreground.unsqueeze(2), _take(boxes, matched), anchors)
    distance = (deltas.float() - encode(target_boxes, anchors)).abs().sum(dim=2)
    return _per_foreground(torch.where(foreground, distance, 0), foreground)


def encode(boxes: Float[Tensor, "... A 4"], anchors: Float[Tensor, "A 4"]) -> Float[Tensor, "... A 4"]:
    """Return the deltas (dx, dy, dw, dh) that turn anchors into xyxy boxes: R-CNN's, with unit weights."""
    anchor_size = anchors[..., 2:] - anchors[..., :2]
    anchor_centre = anchors[..., :2] + 0.5 * anchor_size
    size = boxes[..., 2:] - boxes[..., :2]
    centre = boxes[..., :2] + 0.5 * size
    return torch.cat([(centre - anchor_centre) / anchor_size, torch.log(size / anchor_size)], dim=-1)


def _focal(logits: Tensor, gamma: float) -> Tensor:
    """Focal loss of negatives, without alpha."""
    return torch.sigmoid(logits).pow(gamma) * F.softplus(logits)


def _take(values: Tensor, matched: Tensor) -> Tensor:
    """Each anchor's row of a per-box tensor; row 0 (zeros if there are no boxes) for anchors without a box."""
    if values.shape[1] == 0:
        return values.new_zeros(matched.shape + values.shape[2:])
    index = matched.clamp(min=0)
    if values.dim() == 3:
        index = index.unsqueeze(2).expand(-1, -1, values.shape[2])
    return values.gather(1, index)


def _per_foreground(loss: Tensor, foreground: Tensor) -> Tensor:
    return (loss.sum(dim=1) / foreground.sum(dim=1).clamp(min=1)).mean()
