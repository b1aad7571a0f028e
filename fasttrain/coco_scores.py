"""COCO's twelve numbers, for boxes and for masks, by whichever scorer is installed.

All scorers count the same matches; the numbers are taken from their precisions and recalls in one place, in the order
in which pycocotools adds them up. So hotcoco's equal pycocotools' to the last bit. faster-coco-eval's precisions lack
the 2.2e-16 that pycocotools adds to a divisor, and are apart from its by no more than that.

A scoring process imports this module: it brings neither torch nor Lightning.
"""

import contextlib
import importlib
import importlib.util
import io
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fasttrain.coco_masks import Encoded, encode

NAMES = (
    "map", "map_50", "map_75", "map_small", "map_medium", "map_large",
    "mar_1", "mar_10", "mar_100", "mar_small", "mar_medium", "mar_large",
)  # fmt: skip
"""In the order of pycocotools' `stats`."""

Scorer = Literal["hotcoco", "faster_coco_eval", "pycocotools"]
DETECTION_COLUMNS = 7  # image id, x, y, width, height, score, category id

COSTS = {"faster_coco_eval": "8 to 13 times", "pycocotools": "50 to 110 times"}
"""Of hotcoco's time, on two cores of an AMD EPYC: 100,000 detections of 80 classes, and 300,000 of 264."""


def available_scorer() -> Scorer:
    """Return hotcoco where it is installed, else faster-coco-eval or pycocotools, with a warning that names the cost.

    Raises:
        ImportError: none of them is installed.
    """
    if _installed("hotcoco"):
        return "hotcoco"
    for name in ("faster_coco_eval", "pycocotools"):
        if _installed(name):
            warnings.warn(
                f"hotcoco is not installed, so {name} scores, which takes {COSTS[name]} as long; "
                "`pip install hotcoco` gives the same twelve numbers.",
                stacklevel=2,
            )
            return name
    raise ImportError("nothing that scores by COCO's rules is installed; `pip install hotcoco`.")


def score_boxes(
    ground_truth: Mapping[str, Any],
    detections: NDArray[np.float64],
    scorer: Scorer = "hotcoco",
    per_category: bool = False,
) -> dict[str, float]:
    """Return COCO's twelve numbers by name; -1 where the ground truth has no box of that size.

    Args:
        ground_truth: COCO's dict of images, annotations and categories; not changed.
        detections: (N, 7) rows of image id, x, y, width, height, score, category id; N may be 0.
        scorer: who counts.
        per_category: add each category's `map` and `mar_100`, as `map/NAME`.
    """
    detections = np.asarray(detections, dtype=np.float64).reshape(-1, DETECTION_COLUMNS)
    return _scores(ground_truth, detections, "bbox", scorer, per_category)


def score_masks(
    ground_truth: Mapping[str, Any],
    rows: NDArray[Any],
    scorer: Scorer = "hotcoco",
    per_category: bool = False,
    processes: int | None = None,
) -> dict[str, float]:
    """Return COCO's twelve numbers for masks, which are encoded here, in several processes.

    Args:
        ground_truth: as for boxes, with `segmentation`s, and with `height` and `width` of each image.
        rows: `coco_masks.mask_rows`.
        scorer, per_category: as for boxes.
        processes: that encode; None is as many as this one may have threads (OMP_NUM_THREADS), or there are cores.
    """
    sizes = {image["id"]: (int(image["height"]), int(image["width"])) for image in ground_truth["images"]}
    masks = encode(rows, sizes, processes) if len(rows) else []
    columns = rows["detection"] if len(rows) else np.zeros((0, DETECTION_COLUMNS))
    # With a box beside its mask, a detection would count under the box's area.
    found = [
        {"image_id": int(row[0]), "category_id": int(row[6]), "segmentation": mask, "score": float(row[5])}
        for row, mask in zip(columns, masks, strict=True)
    ]
    return _scores(ground_truth, found, "segm", scorer, per_category)


def score_boxes_and_masks(
    ground_truth: Mapping[str, Any], rows: NDArray[Any], scorer: Scorer = "hotcoco", per_category: bool = False
) -> dict[str, float]:
    """Return the numbers for the boxes of mask rows by `NAMES`, and those for the masks as `mask_map` and so on."""
    boxes = rows["detection"] if len(rows) else np.zeros((0, DETECTION_COLUMNS))
    masks = score_masks(ground_truth, rows, scorer, per_category)
    return {
        **score_boxes(ground_truth, boxes, scorer, per_category),
        **{f"mask_{name}": value for name, value in masks.items()},
    }


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # an entry of sys.modules without a spec
        return False


Found = NDArray[np.float64] | list[dict[str, Any]]


def _scores(truth: Mapping[str, Any], found: Found, kind: str, scorer: Scorer, per_category: bool) -> dict[str, float]:
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation = _EVALUATIONS[scorer](truth, found, kind)
        evaluation.evaluate()
        evaluation.accumulate()
    precision, recall = (np.asarray(evaluation.eval[name]) for name in ("precision", "recall"))
    numbers = dict(zip(NAMES, _twelve(precision, recall), strict=True))
    if per_category:
        for index, name in enumerate(_category_names(truth["categories"])):
            numbers[f"map/{name}"] = _mean(precision[:, :, index, 0, 2])
            numbers[f"mar_100/{name}"] = _mean(recall[:, index, 0, 2])
    return numbers


def _twelve(precision: NDArray[np.float64], recall: NDArray[np.float64]) -> list[float]:
    """Return pycocotools' `stats` of (T, R, K, A, M) precisions and (T, K, A, M) recalls.

    T thresholds of IoU from 0.5 by 0.05, R recalls, K categories, A areas (all, small, medium, large), and M for the 1,
    10 or 100 best detections of an image.
    """
    best_100 = precision[..., 2]
    precisions = [
        best_100[..., 0],
        best_100[0, ..., 0],
        best_100[5, ..., 0],
        *(best_100[..., area] for area in (1, 2, 3)),
    ]
    recalls = [recall[..., 0, count] for count in (0, 1, 2)] + [recall[..., area, 2] for area in (1, 2, 3)]
    return [_mean(values) for values in (*precisions, *recalls)]


def _mean(values: NDArray[np.float64]) -> float:
    there = values[values > -1]
    return float(np.mean(there)) if len(there) else -1.0


def _category_names(categories: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the categories' names in the order of their ids; those that several share with the id behind."""
    ordered = sorted(categories, key=lambda category: category["id"])
    names = [str(category.get("name", category["id"])) for category in ordered]
    shared = {name for name in names if names.count(name) > 1}
    return [
        f"{name} ({category['id']})" if name in shared else name
        for name, category in zip(names, ordered, strict=True)
    ]  # fmt: skip


def _hotcoco(truth: Mapping[str, Any], found: Found, kind: str) -> Any:
    library = importlib.import_module("hotcoco")
    ground_truth = library.COCO(dict(truth))
    return library.COCOeval(ground_truth, ground_truth.load_res(found), kind)


def _faster_coco_eval(truth: Mapping[str, Any], found: Found, kind: str) -> Any:
    library = importlib.import_module("faster_coco_eval")
    ground_truth = library.COCO(_copied(truth))
    return library.COCOeval_faster(
        ground_truth, ground_truth.loadRes(found), kind, print_function=lambda *words: None
    )  # fmt: skip


def _pycocotools(truth: Mapping[str, Any], found: Found, kind: str) -> Any:
    library = importlib.import_module("pycocotools.coco")
    ground_truth, result = library.COCO(), library.COCO()
    ground_truth.dataset = _copied(truth)
    ground_truth.createIndex()
    if len(found):
        result = ground_truth.loadRes(found)
    else:  # which `loadRes` can't load
        result.dataset = {**ground_truth.dataset, "annotations": []}
        result.createIndex()
    return importlib.import_module("pycocotools.cocoeval").COCOeval(ground_truth, result, kind)


def _copied(truth: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy whose annotations may be written to, which these libraries do."""
    return {**truth, "annotations": [dict(annotation) for annotation in truth["annotations"]]}


_EVALUATIONS = {"hotcoco": _hotcoco, "faster_coco_eval": _faster_coco_eval, "pycocotools": _pycocotools}

__all__ = [
    "DETECTION_COLUMNS",
    "NAMES",
    "Encoded",
    "Scorer",
    "available_scorer",
    "score_boxes",
    "score_boxes_and_masks",
    "score_masks",
]
