"""From raw predictions to scored boxes, by the rules of torchvision's RetinaNet, padded to a static shape.

Score above a threshold, the best candidates of each level, non-maximum suppression per class, the best of the image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from fasttrain.recipes.retinanet.suppression import ClassSuppression, picked

if TYPE_CHECKING:
    from jaxtyping import Float, Int

# A predicted side grows by at most this factor over its anchor's; origin: torchvision's BoxCoder (Detectron).
MAX_LOG_SCALE = math.log(1000 / 16)
NO_LABEL = -1


class Detections(NamedTuple):
    """The boxes found in a batch, best first, padded to D per image with zero boxes, score 0 and label NO_LABEL."""

    boxes: Float[Tensor, "B D 4"]
    """float32 xyxy in pixels of the resized image, clipped to it."""
    scores: Float[Tensor, "B D"]
    """float32 in (0, 1], falling."""
    labels: Int[Tensor, "B D"]
    """int64 class indices."""
    count: Int[Tensor, " B"]  # type: ignore[assignment]  # the name of a method that tuples have
    """int64, the boxes of each image that are not padding."""


@torch.no_grad()
def detect(
    logits: Float[Tensor, "B A K"] | Sequence[Float[Tensor, "B L K"]],
    deltas: Float[Tensor, "B A 4"],
    anchors: Float[Tensor, "A 4"],
    anchors_per_level: Sequence[int],
    image_size: tuple[int, int],
    score_threshold: float = 0.05,
    topk_candidates: int = 1000,
    nms_threshold: float = 0.5,
    detections_per_image: int = 300,
    suppression: nn.Module | None = None,
) -> Detections:
    """Return the detections of a batch, all images at once but for what the suppression does.

    Shapes are static, and nothing but the suppression waits for the device.

    Args:
        logits: finite class logits of all levels, finest first, in one tensor or one a level; scored in float32.
        deltas: box deltas in the same order.
        anchors: xyxy in pixels.
        anchors_per_level: how many of the anchors belong to each level.
        image_size: height and width to clip the boxes to.
        score_threshold: scores have to be greater.
        topk_candidates: candidates (box and class) per level that go into the suppression.
        nms_threshold: of two boxes of a class whose IoU is greater, the better one stays.
        detections_per_image: D, the boxes kept per image.
        suppression: what the two before are given to, if that is not `suppression.ClassSuppression`.
    """
    levels = logits.split(list(anchors_per_level), dim=1) if isinstance(logits, Tensor) else logits
    suppress = ClassSuppression(nms_threshold, detections_per_image) if suppression is None else suppression
    scores, labels, anchor_index = _candidates(levels, topk_candidates)
    chosen = deltas.float().gather(1, anchor_index.unsqueeze(2).expand(-1, -1, 4))
    boxes = clip(decode(chosen, anchors[anchor_index]), image_size)
    index, count = suppress(boxes, scores, labels, scores > score_threshold)
    return Detections(
        picked(boxes, index, count, 0.0),
        picked(scores, index, count, 0.0),
        picked(labels, index, count, NO_LABEL),
        count,
    )


def decode(deltas: Float[Tensor, "*batch 4"], anchors: Float[Tensor, "*batch 4"]) -> Float[Tensor, "*batch 4"]:
    """Return the xyxy boxes that the deltas (dx, dy, dw, dh) make of the anchors; the inverse of `loss.encode`."""
    size = anchors[..., 2:] - anchors[..., :2]
    centre = deltas[..., :2] * size + (anchors[..., :2] + 0.5 * size)
    half = 0.5 * (deltas[..., 2:].clamp(max=MAX_LOG_SCALE).exp() * size)
    return torch.cat([centre - half, centre + half], dim=-1)


def clip(boxes: Float[Tensor, "*batch 4"], image_size: tuple[int, int]) -> Float[Tensor, "*batch 4"]:
    """Return xyxy boxes cut off at the borders of an image of (height, width)."""
    x = boxes[..., 0::2].clamp(0, image_size[1])
    y = boxes[..., 1::2].clamp(0, image_size[0])
    return torch.stack([x, y], dim=-1).flatten(-2)


def _candidates(levels: Sequence[Tensor], topk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, labels and anchor indices (B, candidates) of each level's best, in the order of the levels."""
    scores, labels, anchors = [], [], []
    first_anchor = 0
    for logits in levels:
        of_level, classes = logits.shape[1:]
        index = _promising(logits, topk)
        if index is not None:
            logits = logits.gather(1, index.unsqueeze(2).expand(-1, -1, classes))
        flat = logits.float().sigmoid().flatten(1)
        best, place = flat.topk(min(topk, flat.shape[1]), dim=1)
        anchor = place.div(classes, rounding_mode="floor")
        scores.append(best)
        labels.append(place % classes)
        anchors.append((anchor if index is None else index.gather(1, anchor)) + first_anchor)
        first_anchor += of_level
    return torch.cat(scores, dim=1), torch.cat(labels, dim=1), torch.cat(anchors, dim=1)


def _promising(logits: Tensor, topk: int) -> Tensor | None:
    """Return the anchors (B, topk), ascending, among which a level's topk candidates are; None for all of them.

    An anchor that holds one is among the topk by its best class: else topk anchors would each hold a better one. This
    reads the logits once, as they are; scoring them all takes several passes in float32.
    """
    if logits.shape[1] <= topk:
        return None
    return logits.amax(dim=2).topk(topk, dim=1, sorted=False).indices.sort(dim=1).values
