"""How RetinaNet's detections become rows to be scored."""

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fasttrain.hyperparameters import config_of
from fasttrain.recipes.retinanet.detections import Detections
from fasttrain.recipes.retinanet.metric import NAMES, detection_rows
from fasttrain.recipes.retinanet.module import RetinaNetTraining, TrainingConfig


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


@pytest.mark.parametrize("wanted", [False, True])
def test_scores_of_each_category_are_asked_for(wanted: bool) -> None:
    config = TrainingConfig(scores_per_category=wanted)
    assert config_of(TrainingConfig, asdict(config)) == config, "as a checkpoint keeps it"
    module: Any = SimpleNamespace(config=config)
    truth = {
        "images": [{"id": 1, "width": 9, "height": 9}],
        "annotations": [],
        "categories": [{"id": 3, "name": "cell"}],
    }
    scores = RetinaNetTraining.score_function(module)(truth, np.zeros((0, 7)))
    assert list(scores) == [*NAMES, *(["map/cell", "mar_100/cell"] if wanted else [])]
