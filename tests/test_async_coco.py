"""COCO's numbers from the scoring process: those of the judge, in the RetinaNet recipe too; and the bench, small."""

import io
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from test_async_scoring import logged
from test_coco_scores import as_masks, coco_set

from fasttrain.callbacks.async_scoring import AsyncScorer, AsyncScoringOptimization, Scored, Tag
from fasttrain.callbacks.async_scoring.bench import _names, side_by_side
from fasttrain.callbacks.async_scoring.bench_set import generate
from fasttrain.callbacks.async_scoring.history import plain_rows, rows_of
from fasttrain.callbacks.async_scoring.reference import TOLERANCE, reference
from fasttrain.coco_scores import score_boxes, score_boxes_and_masks
from fasttrain.errors import ConfigError
from fasttrain.fit import fit as run
from fasttrain.recipe import find_recipe, resolve
from fasttrain.recipes.retinanet.coco import read_annotations
from fasttrain.validate import validate

# ---- COCO's numbers --------------------------------------------------------------------------------------------------


def test_coco_numbers_equal_those_of_the_judge() -> None:
    cases = [coco_set(seed) for seed in range(10)]  # of all sets, see test_coco_scores
    truths = [truth for truth, _ in cases]  # together, so that one process serves them all
    with AsyncScorer("score_functions:coco_of_set", {"truths": truths}, tell=pytest.fail, most_in_flight=99) as scoring:
        for number, (_, rows) in enumerate(cases):
            scoring.submit([np.full((1, 7), float(number)), rows[:9], rows[9:]], Tag(number, 0))
        outcomes = scoring.drain()
    for (truth, rows), outcome in zip(cases, outcomes, strict=True):
        assert isinstance(outcome, Scored)
        assert outcome.scores == reference(partial(score_boxes, scorer="pycocotools"), truth, [rows])
    assert TOLERANCE == 0


def test_masks_travel_as_rows_and_are_encoded_in_the_process() -> None:
    truth, boxes = coco_set(3)
    rows = as_masks(boxes)
    with AsyncScorer(score_boxes_and_masks, truth, tell=pytest.fail, threads=3) as scoring:
        scoring.submit([rows[:40], rows[40:]], Tag(1, 0))
        scoring.submit([], Tag(2, 0))
        some, none = scoring.drain()
    assert isinstance(some, Scored)
    assert some.scores == reference(partial(score_boxes_and_masks, scorer="pycocotools"), truth, [rows])
    assert some.scores["mask_map"] != some.scores["map"] > 0
    assert isinstance(none, Scored)
    assert none.scores["mask_map"] == 0
    kept = rows_of(plain_rows(rows))  # in a checkpoint
    assert kept.dtype == rows.dtype
    np.testing.assert_array_equal(kept, rows)


def test_real_sets_have_their_published_numbers_and_the_judges(golden: Path, txl_pbc: Path) -> None:
    folder = golden / "coco_eval"
    published = json.loads((folder / "expected.json").read_text())["full_precision"]["bbox"]
    results = json.loads((folder / "instances_val2014_fakebbox100_results.json").read_text())
    found = np.array([[r["image_id"], *r["bbox"], r["score"], r["category_id"]] for r in results])
    coco = json.loads((folder / "instances_val2014_100.json").read_text())
    cells = read_annotations(txl_pbc / "instances_val.json", txl_pbc).to_coco()
    rng = np.random.default_rng(0)
    made_up = np.array(
        [
            [a["image_id"], *(np.array(a["bbox"]) + rng.normal(0, 3, 4)), rng.random(), a["category_id"]]
            for a in cells["annotations"]
        ]
    )
    made_up[:, 3:5] = np.abs(made_up[:, 3:5])
    with AsyncScorer("score_functions:coco_of_set", {"truths": [coco, cells]}, tell=pytest.fail) as scoring:
        scoring.submit([np.full((1, 7), 0.0), found], Tag(0, 0))
        scoring.submit([np.full((1, 7), 1.0), made_up], Tag(1, 0))
        first, second = scoring.drain()
    assert isinstance(first, Scored)
    assert isinstance(second, Scored)
    assert list(first.scores.values()) == published
    assert second.scores == reference(partial(score_boxes, scorer="pycocotools"), cells, [made_up])
    assert 0.1 < second.scores["map"] < 1


# ---- the recipe ------------------------------------------------------------------------------------------------------


def test_retinanet_is_scored_beside_training(tmp_path: Path) -> None:
    data = ["data.generated.train_images=16", "data.generated.val_images=4", "data.batch_size=8", "loggers=[]"]
    tiny = [*data, "trainer.max_epochs=2", "optimizations=none", "optimizations.async_scoring={}"]
    catalogue = {"async_scoring": AsyncScoringOptimization}
    console = Console(file=io.StringIO())
    outcome = run(resolve(find_recipe("retinanet"), tiny), catalogue, run_dir=tmp_path / "run", console=console)
    assert outcome.result["status"] == "finished"
    rows = logged(outcome.folder, "map", "mar_100")
    assert [row[:3] for row in rows] == [(1, 0, "map"), (1, 0, "mar_100"), (3, 1, "map"), (3, 1, "mar_100")]
    assert outcome.result["quality"]["value"] == rows[2][3]
    assert {path.name for path in (outcome.folder / "checkpoints").iterdir()} == {"last.ckpt", "best.ckpt"}
    (told,) = json.loads((outcome.folder / "optimizations.json").read_text())["optimizations"]
    assert [row[:2] for row in told["tables"][0]["rows"]] == [[2, 0], [4, 1]]
    blocking = validate(outcome.folder / "checkpoints" / "last.ckpt", [], catalogue, quiet=True)
    assert (blocking["map"], blocking["mar_100"]) == (rows[2][3], rows[3][3])


# ---- the bench -------------------------------------------------------------------------------------------------------


def test_the_generated_set() -> None:
    truth, parts = generate(images=70, detections=5, classes=3)
    assert [len(part) for part in parts] == [160, 160, 30]
    rows = np.concatenate(parts)
    assert rows[:, 0].tolist() == np.repeat(np.arange(70), 5).tolist()
    assert (rows[:, 3:5] > 0).all()
    assert set(rows[:, 6]) == {0, 1, 2}
    assert len(truth["annotations"]) == 560
    assert 0.01 < score_boxes(truth, rows)["map_50"] < 1
    again, _ = generate(images=70, detections=5, classes=3)
    assert again == truth


def test_the_bench() -> None:
    found = list(side_by_side("small", images=40, detections=20, scorers="hotcoco,torchmetrics", baseline_seconds=0.1))
    assert [row.variant for row in found[::5]] == ["hotcoco", "torchmetrics"]
    assert _names("installed")[0] == "hotcoco"
    assert {(row.subject, row.case) for row in found} == {("async_scoring", "small")}
    for first in range(0, len(found), 5):
        rows = {row.metric: row.value for row in found[first : first + 5]}
        assert set(rows) == {
            "seconds", "seconds_until_it_arrived", "max_difference", "stall_fraction", "speed_while_scoring"
        }  # fmt: skip
        assert 0 < rows["seconds"] < rows["seconds_until_it_arrived"]
        assert rows["speed_while_scoring"] > 0
        assert rows["max_difference"] == (0 if first == 0 else pytest.approx(0, abs=1e-3)), "torchmetrics is float32"


def test_the_bench_stops_a_scorer_that_takes_too_long() -> None:
    rows = list(side_by_side("small", images=400, detections=300, scorers="pycocotools", limit_seconds=2.0,
                             baseline_seconds=0.1))  # fmt: skip
    assert [row.metric for row in rows] == ["seconds_at_least", "stall_fraction", "speed_while_scoring"]
    assert rows[0].value == 2
    with pytest.raises(ConfigError, match="there is no scorer 'hotcocoa'; did you mean 'hotcoco'"):
        list(side_by_side("small", images=4, scorers="hotcocoa"))
