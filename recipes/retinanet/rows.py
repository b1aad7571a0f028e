"""An evaluation's detections on their way to the host, which neither they nor the next batch wait for."""

from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fasttrain.recipes.retinanet.detections import Detections
from fasttrain.recipes.retinanet.metric import detection_rows

BATCHES_ON_THE_WAY = 2
"""While the device works on these, the host makes rows of the ones before."""


class DetectionRows:
    """Takes detections batch by batch, and gives them back as COCO result rows.

    On a GPU a batch is copied to pinned memory behind the work that makes it, and its rows are made when the batches
    after it are under way: the device always has something to do.

    Args:
        image_size: height and width that all images were resized to.
    """

    def __init__(self, image_size: tuple[int, int]) -> None:
        self.image_size = image_size
        self._coming: deque[tuple[torch.cuda.Event | None, list[Tensor]]] = deque()
        self._rows: list[NDArray[np.float64]] = []

    def add(self, detections: Detections, image_ids: Tensor, original_sizes: Tensor) -> None:
        """Take a batch; arguments as for `detection_rows`. Their memory may be written to afterwards."""
        tensors = [tensor.detach().to("cpu", non_blocking=True) for tensor in (*detections, image_ids, original_sizes)]
        done = None
        if detections.boxes.is_cuda:
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(detections.boxes.device))
        self._coming.append((done, tensors))
        while len(self._coming) > (0 if done is None else BATCHES_ON_THE_WAY):
            self._take_one()

    def take(self) -> list[NDArray[np.float64]]:
        """Return the rows of all batches since the last call, an array a batch; waits for those still to come."""
        while self._coming:
            self._take_one()
        rows, self._rows = self._rows, []
        return rows

    def _take_one(self) -> None:
        done, (*detections, image_ids, original_sizes) = self._coming.popleft()
        if done is not None:
            done.synchronize()
        self._rows.append(detection_rows(Detections(*detections), image_ids, original_sizes, self.image_size))
