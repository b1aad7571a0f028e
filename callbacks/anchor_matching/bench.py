"""The matching of an MLPerf RetinaNet batch: the recipe's own, compiled, by the kernels, and the floor."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fasttrain.bench import Case
from fasttrain.callbacks.anchor_matching.matcher import match_anchors
from fasttrain.floor import H200_BYTES_PER_SECOND
from fasttrain.measure import Row, captured, make_row, sample_ms
from fasttrain.recipes.retinanet.anchors import level_anchors
from fasttrain.recipes.retinanet.matching import match

CASE = "retinanet_800_b32"
# MLPerf Training v2.0, RetinaNet: images of 800 x 800, nine anchors a cell at strides 8 to 128, padded to 1000 boxes.
SIDE, BATCH, MAX_BOXES = 800, 32, 1000
LEVELS, SIZES, RATIOS = (3, 4, 5, 6, 7), (32, 64, 128, 256, 512), (0.5, 1.0, 2.0)
# Boxes of an image: a median of 6, about 12 on average, and a few images with many.
MEDIAN_BOXES, SPREAD, MOST_BOXES = 6.0, 1.2, 300

Batch = tuple[Tensor, Tensor, Tensor]


def cases() -> list[Case]:
    """Return the room's bench case."""
    summary = f"{BATCH} images of {SIDE}², 120,087 anchors, {MAX_BOXES} boxes of which about 12 are real"
    return [Case("anchor_matching", CASE, summary, retinanet_800_b32, True)]


def retinanet_800_b32() -> Iterator[Row]:
    """Yield milliseconds of each way to match, replayed as a CUDA graph; ours also by eager launches."""
    batch = mlperf_batch(torch.device("cuda"))
    real = int((batch[2] >= 0).sum())
    about = f"{real} real boxes"
    yield _row("ours", captured(lambda: match_anchors(*batch)), f"replays of a CUDA graph, {about}")
    yield _row("ours_eager", lambda: match_anchors(*batch), f"launched from Python, {about}")
    yield _row("plain", captured(lambda: match(*batch)), f"replays of a CUDA graph, all {MAX_BOXES} boxes of an image")
    compiled = torch.compile(match, dynamic=False, fullgraph=True)
    compiled(*batch)
    yield _row("compile", captured(lambda: compiled(*batch)), "replays of a CUDA graph, torch.compile of plain")
    moved = BATCH * len(batch[0]) * 8 + batch[0].nbytes + batch[2].nbytes
    floor_ms = moved / H200_BYTES_PER_SECOND * 1e3
    note = f"{moved / 1e6:.1f} MB at 4.3 TB/s: int64 indices out, anchors and labels in; no arithmetic counted"
    yield make_row("anchor_matching", CASE, "floor", "ms", "ms", [floor_ms], note)


def mlperf_batch(device: torch.device, images: int = BATCH, max_boxes: int = MAX_BOXES) -> Batch:
    """Return anchors, boxes and labels in which every image has a few boxes of all sizes, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.randn(images, generator=generator).mul(SPREAD).exp().mul(MEDIAN_BOXES)
    counts = counts.clamp(1, min(MOST_BOXES, max_boxes)).round()
    # Sides of 8 to 800 pixels, evenly over their logarithms.
    size = 8 * 100 ** torch.rand(images, max_boxes, 2, generator=generator)
    corner = torch.rand(images, max_boxes, 2, generator=generator) * (SIDE - size)
    labels = torch.randint(264, (images, max_boxes), generator=generator)
    is_real = torch.arange(max_boxes) < counts[:, None]
    boxes = torch.cat([corner, corner + size], dim=2) * is_real[..., None]
    anchors = torch.cat(level_anchors((SIDE, SIDE), LEVELS, SIZES, 3, RATIOS))
    return anchors.to(device), boxes.to(device), labels.where(is_real, -1).to(device)


def _row(variant: str, call: Callable[[], Any], note: str) -> Row:
    return make_row("anchor_matching", CASE, variant, "ms", "ms", sample_ms(call, "cuda", warmup=3, repeats=30), note)
