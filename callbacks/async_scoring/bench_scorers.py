"""Other libraries' COCO scores, for the bench: in a file that brings no package with it."""

import contextlib
import importlib
import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

NAMES = (
    "map", "map_50", "map_75", "map_small", "map_medium", "map_large",
    "mar_1", "mar_10", "mar_100", "mar_small", "mar_medium", "mar_large",
)  # fmt: skip


def faster_coco_eval(truth: dict[str, Any], rows: NDArray[np.float64]) -> dict[str, float]:
    """Return COCO's twelve numbers by faster-coco-eval."""
    library = importlib.import_module("faster_coco_eval")
    with contextlib.redirect_stdout(io.StringIO()):
        ground_truth = library.COCO(truth)
        found = ground_truth.loadRes(rows)
        evaluation = library.COCOeval_faster(ground_truth, found, "bbox", print_function=lambda *words: None)
        evaluation.run()
    return dict(zip(NAMES, map(float, evaluation.stats[:12]), strict=True))


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
