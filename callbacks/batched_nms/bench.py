"""Suppression of an evaluation batch's candidates: image by image, ours, and ours without a graph."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from fasttrain.bench import Case
from fasttrain.callbacks.batched_nms.candidates import CANDIDATES, LEVELS, random_candidates
from fasttrain.callbacks.batched_nms.reference import reference
from fasttrain.callbacks.batched_nms.suppression import batched_nms
from fasttrain.floor import H200_BYTES_PER_SECOND
from fasttrain.measure import Row, captured, make_row, sample_ms

BATCH = 32


def cases() -> list[Case]:
    """Return the room's bench case."""
    summary = f"{BATCH} images of {LEVELS} x {CANDIDATES} candidates, of which 300 are kept"
    return [Case("batched_nms", f"retinanet_b{BATCH}", summary, retinanet_batch, needs_gpu=True)]


def retinanet_batch(*, repeats: int = 30) -> Iterator[Row]:
    """Yield milliseconds a batch of each way.

    Args:
        repeats: of each; image by image a third of them.
    """
    candidates = random_candidates(torch.device("cuda"), BATCH)
    there = f"{int(candidates[3].sum())} candidates above the threshold"
    yield _row("ours", captured(lambda: batched_nms(*candidates)), f"replays of a CUDA graph, {there}", repeats)
    yield _row("ours_eager", lambda: batched_nms(*candidates), f"launched from Python, {there}", repeats)
    plain = f"torchvision.ops.batched_nms image by image, {there}"
    yield _row("plain", lambda: reference(*candidates), plain, max(3, repeats // 3))
    moved = sum(each.nbytes for each in candidates)
    note = f"{moved / 1e6:.1f} MB at 4.3 TB/s: the candidates read once; no order, no arithmetic counted"
    floor_ms = moved / H200_BYTES_PER_SECOND * 1e3
    yield make_row("batched_nms", f"retinanet_b{BATCH}", "floor", "ms", "ms", [floor_ms], note)


def _row(variant: str, call: Callable[[], Any], note: str, repeats: int) -> Row:
    samples = sample_ms(call, "cuda", warmup=3, repeats=repeats)
    return make_row("batched_nms", f"retinanet_b{BATCH}", variant, "ms", "ms", samples, note)
