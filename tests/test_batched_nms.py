"""batched_nms's kernel against torchvision's suppression, image by image: the same candidates in the same order."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fasttrain.callbacks.batched_nms import BatchedNMSOptimization, BatchedSuppression, batched_nms
from fasttrain.callbacks.batched_nms.candidates import Candidates, random_candidates
from fasttrain.callbacks.batched_nms.reference import reference
from fasttrain.callbacks.batched_nms.sites import BatchedNMSPatches
from fasttrain.environment import Hardware
from fasttrain.errors import OptimizationError
from fasttrain.optimization import Context, Refuses
from fasttrain.patches import PatchSurgery
from fasttrain.plan import requested
from fasttrain.recipes.retinanet.model import RetinaNet, RetinaNetConfig
from fasttrain.recipes.retinanet.suppression import ClassSuppression

pytest.importorskip("triton")
from fasttrain.callbacks.batched_nms import in_triton
from fasttrain.callbacks.batched_nms.in_triton import Tiling
from fasttrain.callbacks.batched_nms.kernel import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED.value else "cuda")
SMALL = Tiling(candidates=16, kept=8, warps=1)
"""Several tiles of candidates and of those kept in a small image."""


def assert_same(candidates: Candidates, iou_threshold: float = 0.5, most: int = 20, tiling: Tiling = SMALL) -> Tensor:
    index, count = in_triton.suppress(*candidates, iou_threshold, most, tiling)
    expected, expected_count = reference(*candidates, iou_threshold, most)
    assert torch.equal(count, expected_count)
    assert torch.equal(index, expected)
    assert index.dtype == count.dtype == torch.int64
    return count


@st.composite
def crowds(draw: st.DrawFn) -> Candidates:
    """Boxes on a coarse grid, so that boxes and scores are often equal, and IoUs exactly 1/2, 1/3 and the like."""
    images, number, classes = draw(st.integers(1, 3)), draw(st.integers(0, 70)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    side = draw(st.sampled_from([0.1, 1.0, 7.3]))
    corner = torch.randint(6, (images, number, 2), generator=generator)
    size = torch.randint(0, 5, (images, number, 2), generator=generator)
    boxes = torch.cat([corner, corner + size], dim=2) * side
    scores = torch.randint(1, 9, (images, number), generator=generator) / 10
    labels = torch.randint(classes, (images, number), generator=generator)
    takes_part = torch.rand(images, number, generator=generator) < draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    return boxes.to(DEVICE), scores.to(DEVICE), labels.to(DEVICE), takes_part.to(DEVICE)


@settings(max_examples=15, deadline=None)
@given(crowds(), st.sampled_from([0.2, 1 / 3, 0.5, 0.7, 0.0]), st.sampled_from([1, 7, 20, 80]))
def test_crowds_of_ties_are_torchvisions(candidates: Candidates, iou_threshold: float, most: int) -> None:
    assert_same(candidates, iou_threshold, most)


@pytest.mark.parametrize("number", [900, 1300], ids=["classes set apart", "class by class"])
def test_a_detectors_candidates_are_torchvisions(number: int) -> None:
    candidates = random_candidates(DEVICE, images=2, candidates=number, objects=4)
    some = 4 * int(candidates[3].sum(dim=1).min())
    most = 4 * int(candidates[3].sum(dim=1).max())
    assert (most <= 4000) if number == 900 else (some < 4000), "on a CPU torchvision changes its way at 4000"
    candidates[3][0] = True  # above the limit for the second case, which the other image stays below
    count = assert_same(candidates, most=100, tiling=in_triton.TILING)
    assert int(count.min()) > 20


def test_ious_within_a_rounding_of_the_threshold_are_torchvisions() -> None:
    """A third of its width apart two boxes have an IoU of 1/2, give or take the last bit: pairs that lie alone."""
    generator = torch.Generator().manual_seed(0)
    size = torch.rand(400, 2, generator=generator) * 50 + 5
    corner = torch.arange(400)[:, None] * 200.0 + torch.rand(400, 2, generator=generator)
    shift = torch.stack([size[:, 0] / 3, torch.zeros(400)], dim=1)
    first = torch.cat([corner, corner + size], dim=1)
    second = torch.cat([corner + shift, corner + shift + size], dim=1)
    boxes = torch.stack([first, second], dim=1).reshape(1, 800, 4).to(DEVICE)
    scores = torch.rand(1, 800, generator=generator).to(DEVICE)
    all_of_them = torch.ones(1, 800, dtype=torch.bool, device=DEVICE)
    labels = torch.zeros(1, 800, dtype=torch.int64, device=DEVICE)
    count = assert_same((boxes, scores, labels, all_of_them), most=800, tiling=in_triton.TILING)
    assert 420 < int(count) < 780, "some pairs fall on either side"


def test_all_suppressed_but_one_and_none_at_all() -> None:
    boxes = torch.tensor([5.0, 5.0, 40.0, 30.0], device=DEVICE).repeat(2, 40, 1)
    scores = torch.full((2, 40), 0.5, device=DEVICE)
    labels = torch.zeros(2, 40, dtype=torch.int32, device=DEVICE)
    takes_part = torch.ones(2, 40, dtype=torch.bool, device=DEVICE)
    takes_part[1] = False
    assert assert_same((boxes, scores, labels, takes_part)).tolist() == [1, 0]
    index, _ = batched_nms(boxes, scores, labels, takes_part)
    assert index[0, 0] == 0, "of equals the first"


def test_no_candidate_and_no_image() -> None:
    for images, number in ((2, 0), (0, 5)):
        empty = (torch.zeros(images, number, 4), *(torch.zeros(images, number) for _ in range(3)))
        index, count = batched_nms(
            *(each.to(DEVICE) for each in (empty[0], empty[1], empty[2].long(), empty[3].bool()))
        )
        assert index.shape == (images, 300)
        assert count.tolist() == [0] * images


@pytest.mark.parametrize("tiling", [Tiling(16, 16, 1), Tiling(64, 32, 4), Tiling(32, 128, 4)], ids=str)
def test_tilings(tiling: Tiling) -> None:
    assert_same(random_candidates(DEVICE, 2, 150, objects=3, classes=3), most=60, tiling=tiling)


def test_what_takes_no_part_may_be_anything() -> None:
    candidates = random_candidates(DEVICE, 2, 100, objects=3)
    boxes, scores, labels, takes_part = candidates
    wanted = batched_nms(*candidates)
    nonsense = (
        boxes.masked_fill(~takes_part[..., None], torch.nan),
        scores.masked_fill(~takes_part, torch.nan),
        labels.masked_fill(~takes_part, 10**6),
        takes_part,
    )
    assert all(map(torch.equal, batched_nms(*nonsense), wanted))


def test_a_retinanet_detects_the_same() -> None:
    torch.manual_seed(0)
    config = RetinaNetConfig(num_classes=5, backbone="small", image_size=(64, 96), fpn_channels=16, head_depth=1,
                             topk_candidates=60, detections_per_image=30)  # fmt: skip
    model = RetinaNet(config).eval().to(DEVICE)
    with torch.no_grad():
        model.head.classification_head.cls_logits.weight.mul_(40)
        model.head.classification_head.cls_logits.bias.zero_()
        images = torch.randint(256, (3, 3, 64, 96), dtype=torch.uint8).to(DEVICE)
        levels = model.forward_levels(images)
        wanted = model.detect(levels)
        assert all(map(torch.equal, model.detect(model(images)), wanted)), "levels or one tensor"
        names = list(model.state_dict())
        surgery = PatchSurgery(model, BatchedNMSPatches())
        assert [change.path for change in surgery.apply()] == ["suppression"]
        assert isinstance(model.suppression, BatchedSuppression)
        assert all(map(torch.equal, model.detect(levels), wanted))
    assert int(wanted.count.min()) > 10
    assert list(model.state_dict()) == names
    assert not BatchedNMSPatches().sites(model), "replaced once"
    assert isinstance(pickle.loads(pickle.dumps(copy.deepcopy(model))).suppression, BatchedSuppression)
    surgery.undo()
    assert isinstance(model.suppression, ClassSuppression)


def test_without_a_kernel_it_is_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    boxes, scores, labels, takes_part = random_candidates(torch.device("cpu"), 2, 50, objects=2)
    candidates = (boxes.double(), scores.double(), labels, takes_part)
    plain = ClassSuppression(0.4, 10)
    assert all(map(torch.equal, BatchedSuppression(plain)(*candidates), plain(*candidates)))
    with pytest.raises(OptimizationError, match=r"no kernel for boxes in torch\.float64, .* image by image with"):
        batched_nms(*candidates)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(1, 4, 3)}, r"boxes are \(B, N, 4\).* these are \(1, 4, 3\), \(1, 4\), \(1, 4\) and \(1, 4\)"),
        ({2: torch.zeros(1, 5, dtype=torch.int64)}, r"labels and is_candidate \(B, N\)"),
        ({3: torch.ones(1, 4)}, r"is_candidate is bool; this is torch\.float32"),
    ],
)
def test_what_doesnt_fit_is_refused(change: dict[int, Tensor], message: str) -> None:
    given = [*random_candidates(torch.device("cpu"), 1, 4, objects=1)]
    for place, tensor in change.items():
        given[place] = tensor
    with pytest.raises(OptimizationError, match=message):
        batched_nms(*given)


def test_the_plan_says_where_it_acts() -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.suppression = ClassSuppression()

    ((room,), _) = requested({"batched_nms": {}}, {"batched_nms": BatchedNMSOptimization})
    cpu = Hardware("cpu", "cpu", "a CPU", 2)
    assert room.check(Context(nn.Linear(1, 1), None, cpu)) == Refuses(  # type: ignore[arg-type]
        "Linear has no suppression to replace, a module whose fasttrain_role is 'batched_nms'"
    )
    assert "need an NVIDIA GPU" in room.check(Context(Detector(), None, cpu)).reason  # type: ignore[arg-type, union-attr]
    watched = Detector()
    watched.suppression.register_forward_hook(lambda *_: None)
    assert "'suppression' is watched by hooks" in room.check(Context(watched, None, cpu)).reason  # type: ignore[arg-type, union-attr]
