"""anchor_matching's kernels against torchvision's Matcher and the RetinaNet recipe's matching: the same bits."""

import copy
import pickle
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchvision.ops import box_iou

from fasttrain.callbacks.anchor_matching import (
    AnchorMatchingConfig,
    AnchorMatchingOptimization,
    FusedAnchorMatcher,
    match_anchors,
    matcher,
)
from fasttrain.callbacks.anchor_matching.reference import reference
from fasttrain.callbacks.anchor_matching.sites import AnchorMatchingPatches
from fasttrain.environment import Hardware
from fasttrain.errors import OptimizationError
from fasttrain.optimization import Applies, Context, Refuses
from fasttrain.patches import PatchSurgery
from fasttrain.recipes.retinanet.anchors import level_anchors
from fasttrain.recipes.retinanet.matching import BACKGROUND, BETWEEN_THRESHOLDS, AnchorMatcher, match
from fasttrain.recipes.retinanet.model import RetinaNet, RetinaNetConfig

pytest.importorskip("triton")
from fasttrain.callbacks.anchor_matching import in_triton
from fasttrain.callbacks.anchor_matching.in_triton import Tiling
from fasttrain.callbacks.anchor_matching.kernel import INTERPRETED

DEVICE = "cpu" if INTERPRETED.value else "cuda"
ANCHORS = torch.cat(level_anchors((64, 64), (4, 5), (16, 32), 3, (0.5, 1.0, 2.0))).to(DEVICE)
SMALL = Tiling(anchors=64, warps=1)
"""Three tiles of 180 anchors, the last in part."""


def random_boxes(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(count, 2, generator=generator) * 50
    return torch.cat([corner, corner + 2 + torch.rand(count, 2, generator=generator) * 40], dim=1).to(DEVICE)


def batch_of(*images: Tensor, to: int = 0) -> tuple[Tensor, Tensor]:
    """Return boxes and labels, padded to at least `to`."""
    to = max(to, *map(len, images))
    boxes, labels = torch.zeros(len(images), to, 4, device=DEVICE), torch.full((len(images), to), -1, device=DEVICE)
    for i, real in enumerate(images):
        boxes[i, : len(real)] = real
        labels[i, : len(real)] = torch.arange(len(real)) % 7
    return boxes, labels


def matched_as_in_torchvision(anchors: Tensor, boxes: Tensor, labels: Tensor, tiling: Tiling = SMALL) -> Tensor:
    found = in_triton.match(anchors, boxes, labels, 0.5, 0.4, tiling)
    assert found.dtype == torch.int64
    assert torch.equal(found, reference(anchors, boxes, labels))
    assert torch.equal(found, match(anchors, boxes, labels))
    return found


# Whole pixels on a coarse grid: many equal IoUs, identical boxes, boxes that are anchors, boxes outside the image.
coordinate = st.integers(-2, 9).map(lambda i: 8.0 * i)
side = st.sampled_from([1.0, 8.0, 16.0, 22.0, 32.0, 64.0])
box = st.tuples(coordinate, coordinate, side, side)
rows = st.lists(st.one_of(st.none(), box), min_size=5, max_size=5)  # None is padding, anywhere
thresholds = st.sampled_from([(0.5, 0.4), (0.5, 0.5), (0.9, 0.0), (0.0, 0.0), (1.0, 0.25)])


@settings(max_examples=15, deadline=None)
@given(st.lists(rows, min_size=1, max_size=2), thresholds, st.sampled_from([torch.int32, torch.int64]))
def test_it_is_torchvisions_matcher(images: Any, ious: tuple[float, float], dtype: torch.dtype) -> None:
    given_boxes = torch.tensor([[(0.0,) * 4 if one is None else one for one in row] for row in images], device=DEVICE)
    boxes = torch.cat([given_boxes[..., :2], given_boxes[..., :2] + given_boxes[..., 2:]], dim=2)
    labels = torch.tensor([[-1 if one is None else 3 for one in row] for row in images], dtype=dtype, device=DEVICE)
    found = in_triton.match(ANCHORS, boxes, labels, *ious, SMALL)
    assert found.dtype == match(ANCHORS, boxes, labels, *ious).dtype == torch.int64
    assert torch.equal(found, reference(ANCHORS, boxes, labels, *ious))
    assert torch.equal(found, match(ANCHORS, boxes, labels, *ious))


def test_random_boxes_meet_every_case() -> None:
    batch = batch_of(random_boxes(0, 0), random_boxes(1, 1), random_boxes(20, 2))
    found = matched_as_in_torchvision(ANCHORS, *batch)
    assert torch.equal(found, match_anchors(ANCHORS, *batch)), "in one tile"
    assert (found[0] == BACKGROUND).all()
    assert (found == BETWEEN_THRESHOLDS).any()
    assert len(found[2].unique()) > 10
    below = box_iou(batch[0][2], ANCHORS).amax(dim=0) < 0.4
    assert (found[2][below] >= 0).any(), "some are matched by the low-quality rule"


def test_a_row_longer_than_is_listed_at_once() -> None:
    boxes, labels = batch_of(random_boxes(1100, 3))
    real = torch.tensor([17, 500, 1023, 1024, 1090], device=DEVICE)
    boxes[0, real], labels[0] = ANCHORS[40:45], -1
    labels[0, real] = 3
    found = matched_as_in_torchvision(ANCHORS[40:50], boxes, labels)
    assert torch.equal(found[0, :5], real)
    assert int(real.max()) > in_triton.LISTED_AT_ONCE


def test_more_real_boxes_than_are_scanned_at_once() -> None:
    """Of which the last alone has its highest IoU, a low one, in the second tile."""
    small = torch.tensor([[46.0, 30.0, 50.0, 34.0]], device=DEVICE)
    boxes, labels = batch_of(torch.cat([ANCHORS[:1].repeat(in_triton.SCANNED_AT_ONCE, 1), small]))
    found = matched_as_in_torchvision(ANCHORS[:128], boxes, labels)
    overlap = box_iou(small, ANCHORS[:128])[0]
    assert overlap.max() < 0.4
    assert (overlap == overlap.max()).nonzero().min() >= SMALL.anchors
    assert torch.equal(found[0] == in_triton.SCANNED_AT_ONCE, overlap == overlap.max())


def test_a_box_that_no_anchor_touches_gets_all_that_have_no_better() -> None:
    far = torch.tensor([[1000.0, 1000.0, 1010.0, 1010.0]], device=DEVICE)
    found = matched_as_in_torchvision(ANCHORS, *batch_of(far, torch.cat([random_boxes(2, 5), far]), to=4))
    assert (found[0] == 0).all()
    assert (found[1] >= 0).all()


def test_thresholds_belong_to_the_better_side() -> None:
    widths = [4.0, 8.0, 8.1, 10.0, 10.1]  # IoU 1, 0.5, less, 0.4, less
    anchors = torch.tensor([[0.0, 0.0, width, 10.0] for width in widths], device=DEVICE)
    found = matched_as_in_torchvision(anchors, *batch_of(anchors[:1]))
    assert found[0].tolist() == [0, 0, BETWEEN_THRESHOLDS, BETWEEN_THRESHOLDS, BACKGROUND]


def test_padding_matches_nothing_wherever_it_stands_and_whatever_it_holds() -> None:
    real = random_boxes(2, seed=3)
    boxes = torch.stack([ANCHORS[100], real[0], torch.full((4,), torch.nan, device=DEVICE), real[1]])[None]
    found = matched_as_in_torchvision(ANCHORS, boxes, torch.tensor([[-1, 1, -1, 2]], device=DEVICE))
    assert set(found.unique().tolist()) <= {1, 3, BACKGROUND, BETWEEN_THRESHOLDS}


@pytest.mark.parametrize(("batch", "most"), [(0, 3), (2, 0), (0, 0), (2, 3)])
def test_without_a_box_all_is_background(batch: int, most: int) -> None:
    boxes = torch.ones(batch, most, 4, device=DEVICE)
    found = match_anchors(ANCHORS, boxes, torch.full((batch, most), -1, device=DEVICE))
    assert torch.equal(found, torch.full((batch, len(ANCHORS)), BACKGROUND, device=DEVICE))


def test_without_anchors_there_is_nothing() -> None:
    assert match_anchors(ANCHORS[:0], *batch_of(random_boxes(2, 0))).shape == (1, 0)


def test_any_layout_is_taken() -> None:
    boxes, labels = batch_of(random_boxes(5, 6), random_boxes(3, 7))
    wanted = matched_as_in_torchvision(ANCHORS, boxes, labels)
    strided = boxes.permute(2, 1, 0).contiguous().permute(2, 1, 0), labels.t().contiguous().t()
    assert not any(tensor.is_contiguous() for tensor in strided)
    spread = ANCHORS.repeat_interleave(2, dim=0)[::2]
    assert torch.equal(match_anchors(spread, *strided), wanted)
    expanded = boxes[:1].expand(2, -1, -1), labels[:1].expand(2, -1)
    assert torch.equal(match_anchors(ANCHORS, *expanded), wanted[:1].expand(2, -1))


def test_boxes_without_an_area() -> None:
    """The data refuse such boxes. Their IoU is 0 with every anchor that has an area, and they take what is left."""
    point, line = torch.tensor([[20.0, 20.0, 20.0, 20.0], [5.0, 30.0, 60.0, 30.0]], device=DEVICE)
    found = matched_as_in_torchvision(ANCHORS, *batch_of(torch.stack([point, ANCHORS[50], line])))
    assert (found >= 0).all()


def test_an_iou_of_nan_is_background() -> None:
    """0 / 0 takes a box and an anchor without area; NaN takes a corner that is NaN."""
    anchors = ANCHORS.clone()
    anchors[70, 2:] = anchors[70, :2]
    flat, nan = ANCHORS[10].clone(), ANCHORS[20].clone()
    flat[2:], nan[1] = flat[:2], torch.nan
    found = matched_as_in_torchvision(anchors, *batch_of(torch.stack([ANCHORS[90], flat]), ANCHORS[90:91], to=3))
    assert found[0, 70] == BACKGROUND
    assert found[0, 90] == 0
    found = matched_as_in_torchvision(anchors, *batch_of(torch.stack([ANCHORS[90], nan]), to=3))
    assert (found == BACKGROUND).all()


@pytest.mark.parametrize("tiling", [Tiling(32, 1), Tiling(256, 2)])
def test_tiles_of_any_size_give_the_same(tiling: Tiling) -> None:
    matched_as_in_torchvision(ANCHORS, *batch_of(random_boxes(4, 8)), tiling)


def test_shapes_that_dont_fit_are_refused() -> None:
    boxes, labels = batch_of(random_boxes(2, 0))
    with pytest.raises(OptimizationError) as caught:
        match_anchors(ANCHORS, boxes[0], labels)
    assert str(caught.value) == (
        "anchor_matching: anchors are (A, 4), boxes (B, M, 4) and labels (B, M); these are (180, 4), (2, 4) and (1, 2)."
    )
    with pytest.raises(OptimizationError, match=r"are on one device; these are on .*, meta and "):
        match_anchors(ANCHORS, boxes.to("meta"), labels)
    with pytest.raises(OptimizationError, match=r"no kernel for anchors in torch.float64, boxes in torch.float32 and"):
        match_anchors(ANCHORS.double(), boxes, labels)


# The module


@pytest.fixture
def kernel_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's too, which nobody wants outside of a test."""
    monkeypatch.setattr(matcher, "_has_kernel", in_triton.can_take)


def test_the_module_matches_by_the_kernels(kernel_everywhere: None) -> None:
    boxes, labels = batch_of(random_boxes(4, 9))
    plain = AnchorMatcher(0.6, 0.2)
    fused = FusedAnchorMatcher(plain)
    assert str(fused) == "FusedAnchorMatcher(foreground_iou=0.6, background_iou=0.2)"
    plain.register_forward_hook(lambda *_: pytest.fail("not by the plain one"))
    wanted = match(ANCHORS, boxes, labels, 0.6, 0.2)
    assert not torch.equal(wanted, match(ANCHORS, boxes, labels))
    for each in (fused, copy.deepcopy(fused)):
        assert torch.equal(each(ANCHORS, boxes, labels), wanted)


def test_what_has_no_kernel_is_matched_by_the_plain_one() -> None:
    boxes, labels = batch_of(random_boxes(4, 9))
    fused = pickle.loads(pickle.dumps(FusedAnchorMatcher(AnchorMatcher(0.5, 0.4))))
    wide = ANCHORS.double(), boxes.double(), labels
    assert torch.equal(fused(*wide), match(*wide))
    assert torch.equal(fused(ANCHORS, boxes, labels.short()), match(ANCHORS, boxes, labels))
    assert not list(fused.children())


def test_torch_compile_takes_the_plain_one_whole() -> None:
    torch._dynamo.reset()
    batch = ANCHORS, *batch_of(random_boxes(4, 9))
    compiled = torch.compile(FusedAnchorMatcher(AnchorMatcher(0.5, 0.4)), backend="eager", fullgraph=True)
    assert torch.equal(compiled(*batch), match(*batch))


# The sites


def small_retinanet() -> RetinaNet:
    torch.manual_seed(0)
    return RetinaNet(
        RetinaNetConfig(num_classes=7, backbone="small", image_size=(64, 64), levels=(3, 4), fpn_channels=8,
                        head_depth=1, anchor_sizes=(16, 32), aspect_ratios=(1.0,), foreground_iou=0.6)
    ).to(DEVICE)  # fmt: skip


def test_the_recipes_model_loses_the_same(kernel_everywhere: None) -> None:
    model = small_retinanet()
    names = list(model.state_dict())
    predictions = model(torch.rand(2, 3, 64, 64, device=DEVICE))
    batch = batch_of(random_boxes(3, 1), random_boxes(1, 2), to=5)
    wanted = model.loss(predictions, *batch)
    surgery = PatchSurgery(model, AnchorMatchingPatches())
    assert [change.path for change in surgery.apply()] == ["matcher"]
    assert isinstance(model.matcher, FusedAnchorMatcher)
    found = model.loss(predictions, *batch)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert not surgery.apply()
    assert list(model.state_dict()) == names
    surgery.undo()
    assert isinstance(model.matcher, AnchorMatcher)


def test_a_matcher_with_hooks_is_left() -> None:
    model = nn.Sequential(AnchorMatcher(0.5, 0.4))
    model[0].register_forward_hook(lambda *_: None)
    assert AnchorMatchingPatches().sites(model) == []
    reason = AnchorMatchingPatches().why_no_site(model)
    assert reason == "Sequential has no matcher to replace: '0' is watched by hooks"
    reason = AnchorMatchingPatches().why_no_site(nn.Sequential())
    assert reason == "Sequential has no matcher to replace, a module whose fasttrain_role is 'anchor_matcher'"


def test_trusted_it_applies_where_there_are_kernels() -> None:
    module, data = pl.LightningModule(), pl.LightningDataModule()
    module.matcher = AnchorMatcher(0.5, 0.4)
    door = AnchorMatchingOptimization(AnchorMatchingConfig(measure=False))
    on_cpu = door.check(Context(module, data, Hardware("cpu", "cpu", "a CPU", 2)))
    assert on_cpu == Refuses("the run is on a CPU, and its kernels need an NVIDIA GPU and Triton")
    on_gpu = door.check(Context(module, data, Hardware("cuda", "cuda:0", "a GPU", 2)))
    assert on_gpu == Applies("1 sites; not measured, as asked")
