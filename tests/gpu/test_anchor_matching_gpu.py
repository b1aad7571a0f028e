"""anchor_matching's kernels on a GPU: the same bits at full size, nothing waited for, and in a CUDA graph."""

import pytest
import torch
from torch import Tensor

from fasttrain.callbacks.anchor_matching import FusedAnchorMatcher, match_anchors
from fasttrain.callbacks.anchor_matching.bench import mlperf_batch
from fasttrain.callbacks.anchor_matching.reference import reference
from fasttrain.capture import captured
from fasttrain.recipes.retinanet.matching import AnchorMatcher, match

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def assert_same(anchors: Tensor, boxes: Tensor, labels: Tensor) -> None:
    found = match_anchors(anchors, boxes, labels)
    assert torch.equal(found, match(anchors, boxes, labels))
    assert torch.equal(found, reference(anchors, boxes, labels))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_at_full_size_it_is_torchvisions_matcher(dtype: torch.dtype) -> None:
    anchors, boxes, labels = mlperf_batch(CUDA)
    assert_same(anchors, boxes, labels.to(dtype))


def test_a_thousand_real_boxes() -> None:
    anchors, *_ = mlperf_batch(CUDA, images=2)
    torch.manual_seed(0)
    corner = torch.rand(2, 1000, 2, device=CUDA) * 700
    boxes = torch.cat([corner, corner + 1 + torch.rand(2, 1000, 2, device=CUDA) * 99], dim=2)
    assert_same(anchors, boxes, torch.randint(264, (2, 1000), device=CUDA))


def test_boxes_on_a_grid_tie() -> None:
    anchors, *_ = mlperf_batch(CUDA, images=1)
    torch.manual_seed(1)
    corner = torch.randint(0, 90, (4, 60, 2), device=CUDA) * 8.0
    boxes = torch.cat([corner, corner + torch.randint(0, 9, (4, 60, 2), device=CUDA) * 8.0], dim=2)
    labels = torch.randint(-1, 3, (4, 60), device=CUDA)
    boxes[1, :30] = boxes[1, 30:]
    boxes[2, 7] = 5000.0
    labels[3] = -1
    assert_same(anchors, boxes, labels)
    assert_same(anchors, anchors[torch.randint(len(anchors), (4, 60), device=CUDA)], labels)


def test_it_is_the_same_every_time() -> None:
    batch = mlperf_batch(CUDA)
    first = match_anchors(*batch)
    assert all(torch.equal(match_anchors(*batch), first) for _ in range(10))


def test_nothing_waits_for_the_gpu() -> None:
    batch = mlperf_batch(CUDA, images=2)
    matcher = FusedAnchorMatcher(AnchorMatcher(0.5, 0.4))
    wanted = matcher(*batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = matcher(*batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, wanted)


def test_captured_in_a_graph_it_follows_the_boxes() -> None:
    anchors, boxes, labels = mlperf_batch(CUDA, images=4)
    matcher = FusedAnchorMatcher(AnchorMatcher(0.5, 0.4))
    out = torch.empty(4, len(anchors), dtype=torch.int64, device=CUDA)
    replay = captured(lambda: out.copy_(matcher(anchors, boxes, labels)))
    torch.manual_seed(2)
    for count in (0, 1, 300, 7):
        corner = torch.rand(4, 1000, 2, device=CUDA) * 600
        boxes.copy_(torch.cat([corner, corner + 3 + torch.rand(4, 1000, 2, device=CUDA) * 190], dim=2))
        order = torch.rand(4, 1000, device=CUDA).argsort(dim=1)  # padding stands anywhere
        labels.copy_(torch.where(order < count, order % 264, -1))
        replay()
        assert torch.equal(out, match(anchors, boxes, labels))
