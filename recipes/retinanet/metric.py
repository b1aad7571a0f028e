"""COCO's twelve numbers for boxes, by a fast scorer that equals pycocotools exactly."""

import contextlib
import io
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # a scoring process imports this module, and has no use for torch
    from torch import Tensor

    from fasttrain.recipes.retinanet.detections import Detections

NAMES = (
    "map", "map_50", "map_75", "map_small", "map_medium", "map_large",
    "mar_1", "mar_10", "mar_100", "mar_small", "mar_medium", "mar_large",
)  # fmt: skip
"""In the order of pycocotools' `stats`."""

Scorer = Literal["hotcoco", "pycocotools"]
DETECTION_COLUMNS = 7  # image id, x, y, width, height, score, category id


def detection_rows(
    detections: "Detections", image_ids: "Tensor", original_sizes: "Tensor", image_size: tuple[int, int]
) -> NDArray[np.float64]:
    """Return a batch's detections as COCO result rows, in pixels of the original images.

    Args:
        detections: padded, in pixels of the resized images; moved to the CPU in one copy per tensor.
        image_ids: int64 (B,), ids in the ground truth.
        original_sizes: int64 (B, 2), height and width.
        image_size: height and width that all images were resized to.

    Returns:
        float64 (N, 7): image id, x, y, width, height, score, category id.
    """
    boxes, scores, labels, counts = (part.detach().cpu() for part in detections)
    sizes = original_sizes.cpu().double()
    scale = sizes.flip(1).repeat(1, 2) / sizes.new_tensor([image_size[1], image_size[0]] * 2)
    boxes = boxes.double() * scale[:, None]
    kept = (np.arange(boxes.shape[1])[None] < counts.numpy()[:, None]).reshape(-1)
    xyxy = boxes.reshape(-1, 4).numpy()
    ids = np.repeat(image_ids.cpu().double().numpy(), boxes.shape[1])
    rows = np.column_stack(
        [ids, xyxy[:, :2], xyxy[:, 2:] - xyxy[:, :2], scores.reshape(-1).double(), labels.reshape(-1).double()]
    )
    return np.ascontiguousarray(rows[kept])


def score_boxes(
    ground_truth: Mapping[str, Any], detections: NDArray[np.float64], scorer: Scorer = "hotcoco"
) -> dict[str, float]:
    """Return COCO's twelve numbers by name; -1 where the ground truth has no box of that size.

    Args:
        ground_truth: COCO's dict of images, annotations and categories.
        detections: (N, 7) rows of image id, x, y, width, height, score, category id; N may be 0.
        scorer: hotcoco, or pycocotools, the judge, which takes 50 times as long.
    """
    detections = np.asarray(detections, dtype=np.float64).reshape(-1, DETECTION_COLUMNS)
    # pycocotools can't load an empty result; hotcoco scores it as what it is.
    if scorer == "pycocotools" and len(detections):
        stats = _pycocotools(ground_truth, detections)
    else:
        stats = _hotcoco(ground_truth, detections)
    return dict(zip(NAMES, stats, strict=True))


def available_scorer() -> Scorer:
    """Return hotcoco where it is installed, else pycocotools with a warning that names the cost."""
    try:
        import hotcoco  # noqa: F401
    except ImportError:
        warnings.warn(
            "hotcoco is not installed, so pycocotools scores, which takes about 50 times as long; "
            "`pip install hotcoco` gives the same twelve numbers.",
            stacklevel=2,
        )
        return "pycocotools"
    return "hotcoco"


def _hotcoco(ground_truth: Mapping[str, Any], detections: NDArray[np.float64]) -> list[float]:
    from hotcoco import COCO, COCOeval

    truth = COCO(dict(ground_truth))
    evaluation = COCOeval(truth, truth.load_res(detections), "bbox")
    return _stats(evaluation)


def _pycocotools(ground_truth: Mapping[str, Any], detections: NDArray[np.float64]) -> list[float]:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = dict(ground_truth)
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(detections), "bbox")
    return _stats(evaluation)


def _stats(evaluation: Any) -> list[float]:
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return [float(value) for value in evaluation.stats]
