"""COCO scores: the published numbers exactly, pycocotools as the judge, and how detections get there."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain.recipes.retinanet import metric
from fasttrain.recipes.retinanet.detections import Detections
from fasttrain.recipes.retinanet.metric import NAMES, available_scorer, detection_rows, score_boxes


@pytest.mark.parametrize("scorer", ["hotcoco", "pycocotools"])
def test_published_numbers_are_reproduced_exactly(golden: Path, scorer: metric.Scorer) -> None:
    folder = golden / "coco_eval"
    truth = json.loads((folder / "instances_val2014_100.json").read_text())
    results = json.loads((folder / "instances_val2014_fakebbox100_results.json").read_text())
    expected = json.loads((folder / "expected.json").read_text())["full_precision"]["bbox"]
    rows = np.array([[r["image_id"], *r["bbox"], r["score"], r["category_id"]] for r in results])
    assert list(score_boxes(truth, rows, scorer).values()) == expected


def ground_truth(rng: np.random.Generator, images: int, classes: int) -> dict[str, Any]:
    annotations = []
    for image in range(images):
        for _ in range(rng.integers(0, 6)):
            x, y, w, h = rng.integers(0, 80, 4) + np.array([0, 0, 4, 4])
            crowd = int(rng.random() < 0.1)
            annotations.append(
                {"id": len(annotations) + 1, "image_id": image, "category_id": int(rng.integers(classes)),
                 "bbox": [float(v) for v in (x, y, w, h)], "area": float(w * h), "iscrowd": crowd}
            )  # fmt: skip
    return {
        "info": {},
        "images": [{"id": i, "width": 160, "height": 160, "file_name": f"{i}.jpg"} for i in range(images)],
        "annotations": annotations,
        "categories": [{"id": i, "name": str(i)} for i in range(classes)],
    }


@given(st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_the_fast_scorer_equals_the_judge(seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth = ground_truth(rng, images=4, classes=3)
    rows = [[0, 1, 1, 5, 5, 0.5, 0]]  # pycocotools can't load an empty result
    for annotation in truth["annotations"]:
        for _ in range(rng.integers(0, 4)):
            box = np.array(annotation["bbox"]) + rng.normal(0, 3, 4)
            score = round(float(rng.random()), 1)  # ties in score are frequent
            rows.append([annotation["image_id"], *box[:2], *np.maximum(box[2:], 1), score, rng.integers(3)])
    found = np.array(rows, dtype=np.float64)
    assert score_boxes(truth, found, "hotcoco") == score_boxes(truth, found, "pycocotools")


def test_no_detections_score_zero() -> None:
    truth = ground_truth(np.random.default_rng(0), images=3, classes=2)
    scores = score_boxes(truth, np.zeros((0, 7)))
    assert tuple(scores) == NAMES
    assert scores["map"] == 0
    assert score_boxes(truth, np.zeros((0, 7)), "pycocotools") == scores


def test_rows_are_in_original_pixels_without_padding() -> None:
    detections = Detections(
        boxes=torch.tensor([[[10.0, 20.0, 50.0, 100.0], [0, 0, 0, 0]], [[0, 0, 100, 200], [50, 100, 100, 200]]]),
        scores=torch.tensor([[0.9, 0.0], [0.8, 0.7]]),
        labels=torch.tensor([[2, -1], [0, 1]]),
        count=torch.tensor([1, 2]),
    )
    # Images of 400 x 200 and 100 x 100 (height, width), resized to 200 x 100.
    rows = detection_rows(detections, torch.tensor([5, 7]), torch.tensor([[400, 200], [100, 100]]), (200, 100))
    expected = [
        [5, 20, 40, 80, 160, 0.9, 2],
        [7, 0, 0, 100, 100, 0.8, 0],
        [7, 50, 50, 50, 50, 0.7, 1],
    ]
    np.testing.assert_allclose(rows, expected, atol=1e-7)


def test_without_the_fast_scorer_the_cost_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hotcoco", None)
    with pytest.warns(UserWarning, match="pycocotools scores, which takes about 50 times as long; `pip install"):
        assert available_scorer() == "pycocotools"
