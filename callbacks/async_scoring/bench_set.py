"""A detection set of any size and what a detector might find in it, made up: for timing scorers, not for accuracy."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

OPENIMAGES_VAL_IMAGES, OPENIMAGES_CLASSES, DETECTIONS_PER_IMAGE = 24_781, 264, 300
"""MLPerf Training v2.0's RetinaNet: mlcommons/training, retired_benchmarks/retinanet."""
BOXES_PER_IMAGE = 8
"""Made up; the share of detections that are near a box depends on it, and hardly a scorer's time."""
WIDTH, HEIGHT = 1024.0, 768.0


def generate(
    images: int, detections: int, classes: int = OPENIMAGES_CLASSES, batch: int = 32, seed: int = 0
) -> tuple[dict[str, Any], list[NDArray[np.float64]]]:
    """Return COCO's dict of a set, and rows as batches of an evaluation would leave them.

    Half of the detections lie around a box of their image, mostly with its class; one box in fifty is a crowd. Rows are
    float64 (n, 7): image id, x, y, width, height, score, category id.
    """
    rng = np.random.default_rng(seed)
    image_of = np.repeat(np.arange(images), BOXES_PER_IMAGE)
    boxes = _boxes(rng, len(image_of))
    labels = rng.integers(0, classes, len(image_of))
    crowd = rng.random(len(image_of)) < 0.02
    columns = (image_of.tolist(), labels.tolist(), boxes.tolist(), (boxes[:, 2] * boxes[:, 3]).tolist(), crowd.tolist())
    truth = {
        "info": {},
        "images": [{"id": i, "file_name": f"{i}.jpg", "width": WIDTH, "height": HEIGHT} for i in range(images)],
        "annotations": [
            {"id": i, "image_id": image, "category_id": label, "bbox": box, "area": area, "iscrowd": int(is_crowd)}
            for i, (image, label, box, area, is_crowd) in enumerate(zip(*columns, strict=True), start=1)
        ],
        "categories": [{"id": i, "name": str(i)} for i in range(classes)],
    }
    parts = [
        _rows(rng, np.arange(first, min(first + batch, images)), boxes, labels, detections, classes)
        for first in range(0, images, batch)
    ]
    return truth, parts


def _boxes(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    sizes = np.exp(rng.uniform(np.log(8), np.log(500), (count, 2)))
    corners = rng.random((count, 2)) * (np.array([WIDTH, HEIGHT]) - sizes)
    return np.round(np.concatenate([corners, sizes], 1), 2)


def _rows(
    rng: np.random.Generator,
    images: NDArray[np.int64],
    boxes: NDArray[np.float64],
    labels: NDArray[np.int64],
    detections: int,
    classes: int,
) -> NDArray[np.float64]:
    ids = np.repeat(images, detections)
    near = ids * BOXES_PER_IMAGE + rng.integers(0, BOXES_PER_IMAGE, len(ids))
    found = boxes[near] * rng.normal(1.0, 0.08, (len(ids), 4))
    anywhere = rng.random(len(ids)) < 0.5
    found[anywhere] = _boxes(rng, int(anywhere.sum()))
    category = np.where(anywhere | (rng.random(len(ids)) < 0.2), rng.integers(0, classes, len(ids)), labels[near])
    scores = rng.beta(np.where(anywhere, 1.0, 2.0), 4.0).astype(np.float32)  # a detector's are float32
    return np.column_stack([ids, np.abs(found), scores, category]).astype(np.float64)
