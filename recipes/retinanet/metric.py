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
