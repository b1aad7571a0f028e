"""How RetinaNet's detections become rows that COCO's numbers are computed from."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fasttrain.coco_scores import DETECTION_COLUMNS, NAMES, Scorer, available_scorer, score_boxes

if TYPE_CHECKING:  # a scoring process imports this module, and has no use for torch
    from torch import Tensor

    from fasttrain.recipes.retinanet.detections import Detections

__all__ = ["DETECTION_COLUMNS", "NAMES", "Scorer", "available_scorer", "detection_rows", "score_boxes"]


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
    boxes, scores, labels, counts = (part.detach().cpu().numpy() for part in detections)
    sizes = original_sizes.cpu().numpy().astype(np.float64)
    image, place = np.nonzero(np.arange(boxes.shape[1]) < counts[:, None])
    scale = np.tile(sizes[:, ::-1], 2) / np.array([image_size[1], image_size[0]] * 2, dtype=np.float64)
    xyxy = boxes[image, place].astype(np.float64) * scale[image]
    rows = np.empty((len(image), DETECTION_COLUMNS))
    rows[:, 0] = image_ids.cpu().numpy()[image]
    rows[:, 1:3] = xyxy[:, :2]
    rows[:, 3:5] = xyxy[:, 2:] - xyxy[:, :2]
    rows[:, 5], rows[:, 6] = scores[image, place], labels[image, place]
    return rows
