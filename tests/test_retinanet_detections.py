"""RetinaNet's post-processing against torchvision's."""

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.detection import RetinaNet as TorchvisionRetinaNet

from fasttrain.recipes.retinanet.anchors import level_anchors
from fasttrain.recipes.retinanet.detections import Detections, clip, decode, detect
from fasttrain.recipes.retinanet.loss import encode

SIZE = (96, 160)
CLASSES = 6
LEVEL_ANCHORS = level_anchors(SIZE, (3, 4, 5), (16, 32, 64), 3, (0.5, 1.0, 2.0))
PER_LEVEL = [len(level) for level in LEVEL_ANCHORS]
ANCHORS = torch.cat(LEVEL_ANCHORS)


class NoBackbone(nn.Module):
    out_channels = 8


def predictions(batch: int, shift: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, len(ANCHORS), CLASSES, generator=generator, dtype=torch.float64)
    # Distinct scores: torch.topk leaves the order of equal ones open.
    return (2 * logits + shift).float(), torch.randn(batch, len(ANCHORS), 4, generator=generator)


def torchvision_detections(logits: Tensor, deltas: Tensor, **options: float) -> list[dict[str, Tensor]]:
    reference = TorchvisionRetinaNet(NoBackbone(), CLASSES, **options)
    outputs = {
        "cls_logits": list(logits.split(PER_LEVEL, dim=1)),
        "bbox_regression": list(deltas.split(PER_LEVEL, dim=1)),
    }
    return reference.postprocess_detections(outputs, [LEVEL_ANCHORS] * len(logits), [SIZE] * len(logits))


def assert_same(found: Detections, expected: list[dict[str, Tensor]], room: int) -> None:
    assert found.boxes.shape == (len(expected), room, 4)
    for i, want in enumerate(expected):
        count = int(found.count[i])
        assert count == len(want["scores"])
        assert torch.equal(found.boxes[i, :count], want["boxes"])
        assert torch.equal(found.scores[i, :count], want["scores"])
        assert torch.equal(found.labels[i, :count], want["labels"])
        assert (found.boxes[i, count:] == 0).all()
        assert (found.scores[i, count:] == 0).all()
        assert (found.labels[i, count:] == -1).all()


@pytest.mark.parametrize("shift", [-1.0, -6.0, -9.0], ids=["crowded", "some", "few"])
def test_detections_are_torchvisions(shift: float) -> None:
    logits, deltas = predictions(3, shift)
    expected = torchvision_detections(logits, deltas)
    assert_same(detect(logits, deltas, ANCHORS, PER_LEVEL, SIZE), expected, room=300)
    assert any(len(image["scores"]) for image in expected)


def test_options_are_torchvisions() -> None:
    logits, deltas = predictions(2, -2.0)
    expected = torchvision_detections(
        logits, deltas, score_thresh=0.3, topk_candidates=50, nms_thresh=0.2, detections_per_img=40
    )
    assert_same(detect(logits, deltas, ANCHORS, PER_LEVEL, SIZE, 0.3, 50, 0.2, 40), expected, room=40)


def test_an_image_without_detections_is_all_padding() -> None:
    logits, deltas = predictions(2, -2.0)
    logits[1] = -20
    found = detect(logits, deltas, ANCHORS, PER_LEVEL, SIZE)
    assert found.count[0] > 0
    assert_same(found, torchvision_detections(logits, deltas), room=300)
    assert found.count[1] == 0


def test_a_score_of_exactly_the_threshold_is_left_out() -> None:
    logits = torch.full((1, len(ANCHORS), CLASSES), -20.0)
    logits[0, 7, 2] = 0.0  # its score is exactly 0.5
    deltas = torch.zeros(1, len(ANCHORS), 4)
    assert detect(logits, deltas, ANCHORS, PER_LEVEL, SIZE, score_threshold=0.5).count.tolist() == [0]
    found = detect(logits, deltas, ANCHORS, PER_LEVEL, SIZE, score_threshold=0.49)
    assert found.count.tolist() == [1]
    assert found.labels[0, 0] == 2
    assert torch.equal(found.boxes[0, 0], clip(ANCHORS[7], SIZE))


def test_half_precision_predictions_are_scored_in_float32() -> None:
    logits, deltas = (part.bfloat16() for part in predictions(1, -6.0))
    found = detect(logits, deltas, ANCHORS, PER_LEVEL, SIZE)
    assert found.boxes.dtype == found.scores.dtype == torch.float32
    assert found.count[0] > 0


def test_decode_inverts_encode() -> None:
    boxes = torch.tensor([[10.0, 20.0, 50.0, 45.0], [0.0, 0.0, 3.0, 90.0]])
    anchors = ANCHORS[[100, 1500]]
    torch.testing.assert_close(decode(encode(boxes, anchors), anchors), boxes, rtol=1e-5, atol=1e-4)


def test_a_wild_delta_grows_a_box_by_at_most_62_and_a_half() -> None:
    anchor = torch.tensor([[0.0, 0.0, 16.0, 16.0]])
    box = decode(torch.tensor([[0.0, 0.0, 50.0, 0.0]]), anchor)
    assert float(box[0, 2] - box[0, 0]) == pytest.approx(1000.0)
