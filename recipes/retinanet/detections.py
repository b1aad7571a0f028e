"""From raw predictions to scored boxes, by the rules of torchvision's RetinaNet, padded to a static shape.

Score above a threshold, the best candidates of each level, non-maximum suppression per class, the best of the image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torchvision.ops import batched_nms

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
    logits: Float[Tensor, "B A K"],
    deltas: Float[Tensor, "B A 4"],
    anchors: Float[Tensor, "A 4"],
    anchors_per_level: Sequence[int],
    image_size: tuple[int, int],
    score_threshold: float = 0.05,
    topk_candidates: int = 1000,
    nms_threshold: float = 0.5,
    detections_per_image: int = 300,
) -> Detections:
    """Return the detections of a batch; everything but the suppression is done for all images at once.

    Not for a captured step: the suppression waits for the device once or more per image.

    Args:
        logits: class logits of all levels, finest first; computed on in float32.
        deltas: box deltas in the same order.
        anchors: xyxy in pixels.
        anchors_per_level: how many of the anchors belong to each level.
        image_size: height and width to clip the boxes to.
        score_threshold: scores have to be greater.
        topk_candidates: candidates (box and class) per level that go into the suppression.
        nms_threshold: of two boxes of a class whose IoU is greater, the better one stays.
        detections_per_image: D, the boxes kept per image.
    """
    scores, labels, anchor_index = _candidates(logits, anchors_per_level, topk_candidates)
    picked = deltas.float().gather(1, anchor_index.unsqueeze(2).expand(-1, -1, 4))
    boxes = clip(decode(picked, anchors[anchor_index]), image_size)

    batch = len(boxes)
    found = Detections(
        boxes.new_zeros(batch, detections_per_image, 4),
        scores.new_zeros(batch, detections_per_image),
        labels.new_full((batch, detections_per_image), NO_LABEL),
        labels.new_zeros(batch),
    )
    above = scores > score_threshold
    for image in range(batch):
        mask = above[image]
        image_boxes, image_scores, image_labels = boxes[image][mask], scores[image][mask], labels[image][mask]
        kept = batched_nms(image_boxes, image_scores, image_labels, nms_threshold)[:detections_per_image]
        found.boxes[image, : len(kept)] = image_boxes[kept]
        found.scores[image, : len(kept)] = image_scores[kept]
        found.labels[image, : len(kept)] = image_labels[kept]
        found.count[image] = len(kept)
    return found


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


def _candidates(logits: Tensor, anchors_per_level: Sequence[int], topk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, labels and anchor indices (B, candidates) of each level's best, in the order of the levels."""
    classes = logits.shape[2]
    scores, labels, anchors = [], [], []
    first_anchor = 0
    for level_logits in logits.split(list(anchors_per_level), dim=1):
        flat = level_logits.float().sigmoid().flatten(1)
        best, index = flat.topk(min(topk, flat.shape[1]), dim=1)
        scores.append(best)
        labels.append(index % classes)
        anchors.append(index.div(classes, rounding_mode="floor") + first_anchor)
        first_anchor += level_logits.shape[1]
    return torch.cat(scores, dim=1), torch.cat(labels, dim=1), torch.cat(anchors, dim=1)
