"""COCO's numbers: the published ones, pycocotools as the judge of every scorer on 200 made-up sets, boxes and masks."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fasttrain import coco_scores
from fasttrain.coco_masks import mask_rows, packed
from fasttrain.coco_scores import NAMES, Scorer, available_scorer, score_boxes, score_boxes_and_masks, score_masks

FAST: list[Scorer] = ["hotcoco", *(["faster_coco_eval"] if find_spec("faster_coco_eval") else [])]
SCORERS: list[Scorer] = [*FAST, "pycocotools"]
# faster-coco-eval leaves out pycocotools' np.spacing(1) in a divisor: a precision may be apart by 2.2e-16.
TOLERANCE: dict[Scorer, float] = {"hotcoco": 0.0, "faster_coco_eval": 1e-15, "pycocotools": 0.0}

Set = tuple[dict[str, Any], NDArray[np.float64]]
SIDE = 160


def coco_set(seed: int) -> Set:
    """Return a set and detections with ties, empty images, crowds, areas at COCO's limits, more than 100 detections of
    an image, and detections of a category that the set doesn't have."""
    rng = np.random.default_rng(seed)
    images, annotations, rows = range(3), [], []
    for image in images:
        for _ in range(rng.integers(0, 5) if image != 1 else 0):
            side = rng.choice([32, 96, 31, 97, 20])
            x, y = rng.integers(0, 60, 2)
            annotations.append(
                {"id": len(annotations) + 1, "image_id": image, "category_id": int(rng.integers(2)),
                 "bbox": [float(x), float(y), float(side), float(side)], "area": float(side) ** 2,
                 "segmentation": [[float(v) for v in (x, y, x + side, y, x + side, y + side, x, y + side)]],
                 "iscrowd": int(rng.random() < 0.2)}
            )  # fmt: skip
    for annotation in annotations:
        count = 120 if annotation["id"] == 1 else rng.integers(0, 4)
        for _ in range(count):
            box = np.array(annotation["bbox"]) + rng.integers(-3, 4, 4)
            rows.append([annotation["image_id"], *box, round(float(rng.random()), 1), rng.integers(3)])
    rows += [[image, 1, 1, 32, 32, 0.5, 2] for image in images]  # category 2 is unknown
    truth = {
        "info": {},
        "images": [{"id": i, "width": SIDE, "height": SIDE, "file_name": f"{i}.jpg"} for i in images],
        "annotations": annotations,
        "categories": [{"id": i, "name": f"class {i}"} for i in range(2)],
    }
    return truth, np.array(rows, dtype=np.float64)


def as_masks(rows: NDArray[np.float64]) -> NDArray[Any]:
    """Return rows whose masks are their boxes, each with a notch of its own."""
    x, y, width, height = rows[:, 1:5].astype(int).T[:, :, None, None]
    down, across = np.ogrid[:SIDE, :SIDE]
    masks = (across >= x) & (across < x + width) & (down >= y) & (down < y + height)
    notched = masks & ~((across < x + 7) & (down - y < np.arange(len(rows))[:, None, None] % 9))
    return mask_rows(rows, packed(torch.from_numpy(notched)).numpy())


def with_runs(truth: dict[str, Any]) -> dict[str, Any]:
    """Return the set with its crowds as run lengths, as COCO's files have them."""
    from pycocotools import mask

    annotations = []
    for annotation in truth["annotations"]:
        if annotation["iscrowd"]:
            encoded = mask.frPyObjects(annotation["segmentation"], SIDE, SIDE)[0]
            annotation = {**annotation, "segmentation": encoded}
        annotations.append(annotation)
    return {**truth, "annotations": annotations}


def assert_equal(found: dict[str, float], judge: dict[str, float], scorer: Scorer) -> None:
    assert list(found) == list(judge)
    apart = np.array(list(found.values())) - np.array(list(judge.values()))
    assert np.abs(apart).max() <= TOLERANCE[scorer]


@given(st.integers(0, 10**9))
@settings(max_examples=200, deadline=None, database=None)
def test_box_scores_equal_those_of_the_judge(seed: int) -> None:
    truth, rows = coco_set(seed)
    judge = score_boxes(truth, rows, "pycocotools", per_category=True)
    for scorer in FAST:
        assert_equal(score_boxes(truth, rows, scorer, per_category=True), judge, scorer)


@given(st.integers(0, 10**9))
@settings(max_examples=25, deadline=None, database=None)
def test_mask_scores_equal_those_of_the_judge(seed: int) -> None:
    truth, rows = coco_set(seed)
    truth, masks = with_runs(truth), as_masks(rows)
    judge = score_masks(truth, masks, "pycocotools", per_category=True)
    for scorer in FAST:
        assert_equal(score_masks(truth, masks, scorer, per_category=True), judge, scorer)


@pytest.mark.parametrize("scorer", SCORERS)
def test_published_numbers(golden: Path, scorer: Scorer, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = golden / "coco_eval"
    text = (folder / "instances_val2014_100.json").read_text()
    truth = json.loads(text)
    boxes, masks = (json.loads((folder / f"instances_val2014_fake{kind}100_results.json").read_text())
                    for kind in ("bbox", "segm"))  # fmt: skip
    expected = json.loads((folder / "expected.json").read_text())["full_precision"]
    rows = np.array([[r["image_id"], *r["bbox"], r["score"], r["category_id"]] for r in boxes])
    found = list(score_boxes(truth, rows, scorer).values())
    assert found == pytest.approx(expected["bbox"], rel=0, abs=TOLERANCE[scorer])
    # These are masks of another's encoder: they take the place of those that ours makes of rows.
    monkeypatch.setattr(coco_scores, "encode", lambda *rest: [r["segmentation"] for r in masks])
    rows = mask_rows(
        np.array([[r["image_id"], 0, 0, 0, 0, r["score"], r["category_id"]] for r in masks]),
        np.zeros((len(masks), 1, 1), np.uint8),
    )
    found = list(score_masks(truth, rows, scorer).values())
    # One of the twelve was published from a mean that was added up in another order.
    assert found == pytest.approx(expected["segm"], rel=0, abs=1.2e-16 + TOLERANCE[scorer])
    assert json.loads(text) == truth, "the ground truth is not changed"


def test_real_masks(dsb2018: Path) -> None:
    from pycocotools import mask

    truth = json.loads((dsb2018 / "instances_val.json").read_text())
    images = [image for image in truth["images"] if image["width"] <= 260][:12]
    kept = {image["id"] for image in images}
    annotations = [a for a in truth["annotations"] if a["image_id"] in kept]
    truth = {**truth, "images": images, "annotations": annotations}
    size = max(max(image["width"], image["height"]) for image in images)
    rng, rows, canvas = np.random.default_rng(0), [], np.zeros((len(annotations), size, size), dtype=np.bool_)
    for number, annotation in enumerate(annotations):
        nucleus = np.roll(mask.decode(_bytes(annotation["segmentation"])), rng.integers(-2, 3, 2), (0, 1))
        canvas[number, : nucleus.shape[0], : nucleus.shape[1]] = nucleus
        rows.append([annotation["image_id"], *annotation["bbox"], round(rng.random(), 2), annotation["category_id"]])
    found = mask_rows(np.array(rows), packed(torch.from_numpy(canvas)).numpy())
    scores = [score_boxes_and_masks(truth, found, scorer) for scorer in SCORERS]
    for scorer, given_scores in zip(SCORERS, scores, strict=True):
        assert_equal(given_scores, scores[-1], scorer)
    assert 0.2 < scores[0]["mask_map"] < 1
    assert scores[0]["map"] == 1, "the boxes were not moved"
    assert len(annotations) > 100


def _bytes(segmentation: dict[str, Any]) -> dict[str, Any]:
    counts = segmentation["counts"]
    return {**segmentation, "counts": counts.encode() if isinstance(counts, str) else counts}


@pytest.mark.parametrize("scorer", SCORERS)
def test_no_detections_score_zero(scorer: Scorer) -> None:
    truth, rows = coco_set(1)
    none = score_boxes(truth, np.zeros((0, 7)), scorer)
    assert tuple(none) == NAMES
    assert none["map"] == 0
    assert score_masks(truth, np.zeros(0), scorer) == none
    assert score_boxes({**truth, "annotations": []}, rows, scorer) == dict.fromkeys(NAMES, -1.0)


def test_scores_of_each_category() -> None:
    truth, rows = coco_set(5)
    for category, name in ((0, "cell"), (1, "cell")):
        truth["categories"][category]["name"] = name
    truth["categories"].append({"id": 2, "name": "nucleus"})
    scores = score_boxes(truth, rows, per_category=True)
    assert list(scores)[12:] == [
        "map/cell (0)", "mar_100/cell (0)", "map/cell (1)", "mar_100/cell (1)", "map/nucleus", "mar_100/nucleus"
    ]  # fmt: skip
    there = [scores[f"map/{name}"] for name in ("cell (0)", "cell (1)", "nucleus") if scores[f"map/{name}"] > -1]
    assert np.mean(there) == pytest.approx(scores["map"])
    only = {**truth, "categories": truth["categories"][:1]}
    assert score_boxes(only, rows)["map"] == pytest.approx(scores["map/cell (0)"])


def test_without_the_fast_scorer_the_cost_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("faster_coco_eval")
    assert available_scorer() == "hotcoco"
    monkeypatch.setitem(sys.modules, "hotcoco", None)
    with pytest.warns(UserWarning, match="faster_coco_eval scores, which takes 8 to 13 times as long; `pip install"):
        assert available_scorer() == "faster_coco_eval"
    monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    with pytest.warns(UserWarning, match="pycocotools scores, which takes 50 to 110 times as long; `pip install"):
        assert available_scorer() == "pycocotools"
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    with pytest.raises(ImportError, match="nothing that scores by COCO's rules is installed; `pip install hotcoco`"):
        available_scorer()
