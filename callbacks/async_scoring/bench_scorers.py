"""The bench's scorers, called in the scoring process: in a file that brings no package with it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasttrain.coco_scores import NAMES, score_boxes

ONE_BOX = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [0.0, 0.0, 9.0, 9.0], "area": 81.0, "iscrowd": 0}
ONE_IMAGE = {
    "info": {},
    "images": [{"id": 1, "width": 9, "height": 9}],
    "annotations": [ONE_BOX],
    "categories": [{"id": 1}],
}


def score(work: dict[str, Any], rows: NDArray[np.float64]) -> dict[str, float]:
    """Return COCO's twelve numbers by the scorer that the work names.

    An evaluation without rows loads what the scorer needs, and is one image's.
    """
    truth = work["truth"]
    if not len(rows):
        truth, rows = ONE_IMAGE, np.array([[1, 0, 0, 9, 9, 0.5, 1]], dtype=np.float64)
    return torchmetrics(truth, rows) if work["scorer"] == "torchmetrics" else score_boxes(truth, rows, work["scorer"])


def torchmetrics(truth: dict[str, Any], rows: NDArray[np.float64]) -> dict[str, float]:
    """Return them by torchmetrics as it comes: pycocotools behind it, thresholds in float32."""
    import torch
    from torchmetrics.detection import MeanAveragePrecision

    metric = MeanAveragePrecision(box_format="xywh", iou_type="bbox")
    metric.warn_on_many_detections = False
    by_image: dict[int, list[dict[str, Any]]] = {image["id"]: [] for image in truth["images"]}
    for annotation in truth["annotations"]:
        by_image[annotation["image_id"]].append(annotation)
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    first = np.searchsorted(rows[:, 0], [*by_image, np.inf])
    for number, annotations in enumerate(by_image.values()):
        found = torch.from_numpy(rows[first[number] : first[number + 1]].copy())
        prediction = {"boxes": found[:, 1:5], "scores": found[:, 5], "labels": found[:, 6].long()}
        target = {
            "boxes": torch.tensor([a["bbox"] for a in annotations]).reshape(-1, 4),
            "labels": torch.tensor([a["category_id"] for a in annotations], dtype=torch.long),
            "iscrowd": torch.tensor([a["iscrowd"] for a in annotations], dtype=torch.long),
            "area": torch.tensor([a["area"] for a in annotations]),
        }
        metric.update([prediction], [target])
    scores = metric.compute()
    return {name: float(scores[name]) for name in NAMES}
