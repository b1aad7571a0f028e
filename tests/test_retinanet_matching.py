"""Matching and losses of RetinaNet against torchvision's, on random and on awkward sets of boxes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchvision.models.detection import RetinaNet as TorchvisionRetinaNet
from torchvision.models.detection._utils import Matcher
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import box_iou

from fasttrain.recipes.retinanet import matching
from fasttrain.recipes.retinanet.anchors import level_anchors
from fasttrain.recipes.retinanet.loss import box_loss, encode, focal_loss
from fasttrain.recipes.retinanet.matching import BACKGROUND, BETWEEN_THRESHOLDS, match, pairwise_iou

SIZE = (96, 64)
LEVELS = (3, 4, 5)
ANCHORS = torch.cat(level_anchors(SIZE, LEVELS, (16, 32, 64), 3, (0.5, 1.0, 2.0)))
CLASSES = 5


def torchvision_match(boxes: Tensor) -> Tensor:
    if len(boxes) == 0:
        return torch.full((len(ANCHORS),), BACKGROUND)
    return Matcher(0.5, 0.4, allow_low_quality_matches=True)(box_iou(boxes, ANCHORS))


def random_boxes(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(count, 2, generator=generator) * 60
    return torch.cat([corner, corner + 2 + torch.rand(count, 2, generator=generator) * 40], dim=1)


def padded(images: list[Tensor], to: int) -> tuple[Tensor, Tensor]:
    boxes, labels = torch.zeros(len(images), to, 4), torch.full((len(images), to), -1)
    for i, real in enumerate(images):
        boxes[i, : len(real)] = real
        labels[i, : len(real)] = torch.arange(len(real)) % CLASSES
    return boxes, labels


@pytest.mark.parametrize(
    ("size", "levels", "anchor_sizes"),
    [
        ((800, 800), (3, 4, 5, 6, 7), (32, 64, 128, 256, 512)),
        ((96, 64), (3, 4, 5), (16, 32, 64)),
        ((480, 640), (2, 3, 4, 5), (16, 32, 64, 128)),
    ],
)
def test_anchors_are_torchvisions_bit_for_bit(
    size: tuple[int, int], levels: tuple[int, ...], anchor_sizes: tuple[int, ...]
) -> None:
    scales = tuple((s, int(s * 2 ** (1 / 3)), int(s * 2 ** (2 / 3))) for s in anchor_sizes)
    generator = AnchorGenerator(scales, ((0.5, 1.0, 2.0),) * len(levels))
    x = torch.zeros(1, 1, *size)
    feature = nn.functional.max_pool2d(x, 3, 2, 1)
    features = []
    for level in range(2, max(levels) + 1):
        feature = nn.functional.max_pool2d(feature, 3, 2, 1)
        if level in levels:
            features.append(feature)
    expected = generator(ImageList(x, [size]), features)[0]
    ours = torch.cat(level_anchors(size, levels, anchor_sizes, 3, (0.5, 1.0, 2.0)))
    assert ours.dtype == torch.float32
    assert torch.equal(ours, expected)


def test_iou_is_torchvisions_bit_for_bit() -> None:
    boxes = random_boxes(40, seed=0)
    assert torch.equal(pairwise_iou(boxes[None], ANCHORS)[0], box_iou(boxes, ANCHORS))


# Whole pixels on a coarse grid: many equal IoUs, identical boxes, boxes that are anchors, boxes outside the image.
coordinate = st.integers(-2, 12).map(lambda i: 8.0 * i)
side = st.sampled_from([1.0, 8.0, 16.0, 22.0, 32.0, 64.0])
box_sets = st.lists(st.tuples(coordinate, coordinate, side, side), max_size=6)


@settings(max_examples=25, deadline=None)
@given(st.lists(box_sets, min_size=1, max_size=3), st.sampled_from([6, 9]), st.sampled_from([1, 3000, 2**18]))
def test_matching_is_torchvisions_matcher(sets: list[list[tuple[float, ...]]], to: int, pairs_at_once: int) -> None:
    images = [torch.tensor(boxes).reshape(-1, 4) for boxes in sets]
    images = [torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], dim=1) for boxes in images]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matching, "PAIRS_AT_ONCE_CPU", pairs_at_once)
        matched = match(ANCHORS, *padded(images, to))
    assert matched.dtype == torch.int64
    assert torch.equal(matched, torch.stack([torchvision_match(boxes) for boxes in images]))


def test_matching_of_many_random_boxes_meets_every_case() -> None:
    images = [random_boxes(count, seed=count) for count in (0, 1, 7, 40)]
    matched = match(ANCHORS, *padded(images, 40))
    assert torch.equal(matched, torch.stack([torchvision_match(boxes) for boxes in images]))
    assert (matched[0] == BACKGROUND).all()
    assert (matched == BETWEEN_THRESHOLDS).any()


def test_a_box_too_small_for_any_anchor_gets_its_best_ones() -> None:
    box = torch.tensor([[30.0, 30.0, 34.0, 34.0]])
    overlap = box_iou(box, ANCHORS)[0]
    assert overlap.max() < 0.4
    matched = match(ANCHORS, *padded([box], 2))[0]
    assert torch.equal(matched == 0, overlap == overlap.max())


def test_a_box_that_no_anchor_touches_gets_all_of_them_as_in_torchvision() -> None:
    box = torch.tensor([[1000.0, 1000.0, 1010.0, 1010.0]])
    matched = match(ANCHORS, *padded([box], 2))[0]
    assert (matched == 0).all()
    assert torch.equal(matched, torchvision_match(box))


def test_thresholds_belong_to_the_better_side() -> None:
    box = torch.tensor([[[0.0, 0.0, 4.0, 10.0]]])
    widths = [4.0, 8.0, 8.1, 10.0, 10.1]  # IoU 1, 0.5, less, 0.4, less
    anchors = torch.tensor([[0.0, 0.0, width, 10.0] for width in widths])
    matched = match(anchors, box, torch.tensor([[3]]))
    assert matched[0].tolist() == [0, 0, BETWEEN_THRESHOLDS, BETWEEN_THRESHOLDS, BACKGROUND]


@pytest.mark.parametrize("pairs_at_once", [1, 2**18], ids=["box_by_box", "all_at_once"])
def test_the_first_of_identical_boxes_wins(monkeypatch: pytest.MonkeyPatch, pairs_at_once: int) -> None:
    monkeypatch.setattr(matching, "PAIRS_AT_ONCE_CPU", pairs_at_once)
    box = ANCHORS[500:501]
    matched = match(ANCHORS, *padded([box.repeat(3, 1)], 4))
    assert matched[0, 500] == 0
    assert set(matched[0].tolist()) <= {0, BACKGROUND, BETWEEN_THRESHOLDS}


def test_padding_matches_nothing_wherever_it_stands_and_whatever_it_holds() -> None:
    real = random_boxes(2, seed=3)
    boxes = torch.stack([ANCHORS[100], real[0], torch.full((4,), torch.nan), real[1]])[None]
    labels = torch.tensor([[-1, 1, -1, 2]])
    expected = torch.tensor([1, 3, BETWEEN_THRESHOLDS, BACKGROUND])[torchvision_match(real)]
    assert torch.equal(match(ANCHORS, boxes, labels)[0], expected)


def test_no_room_for_boxes_is_all_background() -> None:
    matched = match(ANCHORS, torch.zeros(2, 0, 4), torch.zeros(2, 0, dtype=torch.int64))
    assert torch.equal(matched, torch.full((2, len(ANCHORS)), BACKGROUND))


class NoBackbone(nn.Module):
    out_channels = 8


def torchvision_losses(logits: Tensor, deltas: Tensor, images: list[Tensor]) -> dict[str, Tensor]:
    reference = TorchvisionRetinaNet(NoBackbone(), CLASSES)
    targets = [{"boxes": boxes, "labels": torch.arange(len(boxes)) % CLASSES} for boxes in images]
    outputs = {"cls_logits": logits, "bbox_regression": deltas}
    return reference.compute_loss(targets, outputs, [ANCHORS] * len(images))


def raw_predictions(batch: int, scale: float) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    logits = (torch.randn(batch, len(ANCHORS), CLASSES) * scale - 3).requires_grad_()
    return logits, torch.randn(batch, len(ANCHORS), 4).requires_grad_()


@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["usual_logits", "saturated_logits"])
@pytest.mark.parametrize("counts", [(3, 0, 12), (0,), (0, 0), (1,)], ids=str)
def test_losses_and_gradients_are_torchvisions(counts: tuple[int, ...], scale: float) -> None:
    images = [random_boxes(count, seed=count + 1) for count in counts]
    boxes, labels = padded(images, 15)
    logits, deltas = raw_predictions(len(counts), scale)
    expected = torchvision_losses(logits, deltas, images)
    wanted = torch.autograd.grad(sum(expected.values()), [logits, deltas])

    matched = match(ANCHORS, boxes, labels)
    cls = focal_loss(logits, labels, matched)
    box = box_loss(deltas, ANCHORS, boxes, matched)
    gradients = torch.autograd.grad(cls + box, [logits, deltas])

    torch.testing.assert_close(cls, expected["classification"], rtol=1e-5, atol=0)
    torch.testing.assert_close(box, expected["bbox_regression"], rtol=1e-5, atol=0)
    for got, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6 * float(want.abs().max()))


def test_losses_are_float32_in_half_precision() -> None:
    images = [random_boxes(4, seed=1)]
    boxes, labels = padded(images, 5)
    logits, deltas = (part.detach().bfloat16().requires_grad_() for part in raw_predictions(1, 1.0))
    matched = match(ANCHORS, boxes, labels)
    cls, box = focal_loss(logits, labels, matched), box_loss(deltas, ANCHORS, boxes, matched)
    expected = torchvision_losses(logits.float(), deltas.float(), images)
    torch.testing.assert_close(cls, expected["classification"], rtol=1e-5, atol=0)
    torch.testing.assert_close(box, expected["bbox_regression"], rtol=1e-5, atol=0)
    (cls + box).backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_a_perfect_box_costs_nothing() -> None:
    boxes, labels = padded([random_boxes(4, seed=1)], 4)
    matched = match(ANCHORS, boxes, labels)
    deltas = encode(boxes[:, matched[0].clamp(min=0)], ANCHORS)
    assert box_loss(deltas, ANCHORS, boxes, matched) == 0
    assert box_loss(deltas + 0.5, ANCHORS, boxes, matched) == pytest.approx(2.0, rel=1e-5)


def test_nothing_in_matching_and_losses_depends_on_the_data() -> None:
    # A fake tensor has a shape and no values: reading one, or a shape made of values, raises.
    with FakeTensorMode():
        anchors = torch.empty(len(ANCHORS), 4)
        boxes, labels = torch.empty(2, 7, 4), torch.empty(2, 7, dtype=torch.int64)
        logits, deltas = (torch.empty(2, len(ANCHORS), n, requires_grad=True) for n in (CLASSES, 4))
        matched = match(anchors, boxes, labels)
        (focal_loss(logits, labels, matched) + box_loss(deltas, anchors, boxes, matched)).backward()
        assert matched.shape == (2, len(ANCHORS))
        assert logits.grad is not None
