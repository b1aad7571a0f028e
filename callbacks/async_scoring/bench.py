"""Seconds of COCO's scorers on an evaluation of OpenImages' size, and what scoring costs the training beside it."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fasttrain.bench import Case
from fasttrain.callbacks.async_scoring import bench_scorers
from fasttrain.callbacks.async_scoring.bench_set import DETECTIONS_PER_IMAGE, OPENIMAGES_VAL_IMAGES, generate
from fasttrain.callbacks.async_scoring.evaluation import Outcome, Scored, Tag
from fasttrain.callbacks.async_scoring.process import ScoreFunction
from fasttrain.callbacks.async_scoring.scorer import AsyncScorer, Rows
from fasttrain.errors import OptimizationError
from fasttrain.measure import Row, make_row, synchronize
from fasttrain.recipes.retinanet.metric import score_boxes

ROOM = "async_scoring"
PEERS = Path(bench_scorers.__file__)
SCORERS: dict[str, ScoreFunction] = {
    "hotcoco": partial(score_boxes, scorer="hotcoco"),
    "faster_coco_eval": f"{PEERS}:faster_coco_eval",
    "pycocotools": partial(score_boxes, scorer="pycocotools"),
    "torchmetrics": f"{PEERS}:torchmetrics",
}
TIMEOUT_SECONDS = 3 * 3600.0


def cases() -> list[Case]:
    """Return the room's bench cases: one for each scorer, since the slowest take many minutes."""
    size = f"{OPENIMAGES_VAL_IMAGES:,} images with {DETECTIONS_PER_IMAGE} detections each"
    whole = [
        Case(ROOM, f"openimages_val_{name}", f"{size}, scored by {name} beside training",
             partial(beside_training, name, "openimages_val"))
        for name in SCORERS
    ]  # fmt: skip
    small = Case(ROOM, "generated_small", "300 images with 100 detections each, by every scorer", generated_small)
    return [*whole, small]


def generated_small(images: int = 300, detections: int = 100, baseline_seconds: float = 2.0) -> Iterator[Row]:
    """Yield the rows of all scorers on a small set."""
    for name in SCORERS:
        yield from beside_training(name, "generated_small", images, detections, baseline_seconds)


def beside_training(
    scorer: str,
    case: str,
    images: int = OPENIMAGES_VAL_IMAGES,
    detections: int = DETECTIONS_PER_IMAGE,
    baseline_seconds: float = 15.0,
) -> Iterator[Row]:
    """Yield one scorer's seconds, the share of them in which training stood still, and training's speed meanwhile.

    A small network trains with one host thread. Its speed without scoring is taken before and after. The seconds are
    the score function's own, beside the training loop. `max_difference` is that of the twelve numbers from hotcoco's.

    Raises:
        OptimizationError: the scorer fails.
    """
    truth, rows = generate(images, detections)
    train = _training()
    before = _steps_per_second(train, baseline_seconds)
    with AsyncScorer(SCORERS[scorer], truth, timeout_seconds=TIMEOUT_SECONDS) as scoring:
        scoring.submit(rows[:1], Tag(0, 0))  # loads what it needs
        scoring.drain()
        outcome, stalled, speed = _score_beside(scoring, rows, train)
    after = _steps_per_second(train, baseline_seconds)
    expected = score_boxes(truth, np.concatenate(rows), "hotcoco")
    note = f"{images} images, {detections} detections each, generated; one network on {_device()} beside it"
    apart = max(abs(value - expected[name]) for name, value in outcome.scores.items())
    wall = outcome.arrived_at - outcome.submitted_at
    for metric, unit, value in (
        ("seconds", "s", outcome.seconds),
        ("seconds_until_it_arrived", "s", wall),
        ("stall_fraction", "1", stalled / outcome.seconds),
        ("speed_while_scoring", "1", speed / ((before + after) / 2)),
        ("max_difference", "1", apart),
    ):
        yield make_row(ROOM, case, scorer, metric, unit, [value], note)


def _score_beside(scoring: AsyncScorer, rows: Rows, train: Callable[[], None]) -> tuple[Scored, float, float]:
    """Return the outcome, the seconds in which training stood still for it, and steps a second until it arrived."""
    steps, outcomes = 0, list[Outcome]()
    begun = time.perf_counter()
    scoring.submit(rows, Tag(1, 0))
    stalled = time.perf_counter() - begun
    while not outcomes:
        train()
        steps += 1
        at_poll = time.perf_counter()
        outcomes = scoring.poll()
        stalled += time.perf_counter() - at_poll
    synchronize(_device())
    return _scored(outcomes[0]), stalled, steps / (time.perf_counter() - begun)


def _scored(outcome: Outcome) -> Scored:
    if not isinstance(outcome, Scored):
        raise OptimizationError(f"the bench's scorer failed: {outcome.faults[-1]}.")
    return outcome


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _training() -> Callable[[], None]:
    """Return a training step of a few milliseconds, launched one by one, as a busy host would."""
    torch.manual_seed(0)
    width = 2048 if _device() == "cuda" else 256
    network = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(width, width), nn.ReLU()))).to(_device())
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, foreach=True)
    batch = torch.randn(width, width, device=_device())

    def step() -> None:
        optimizer.zero_grad()
        network(batch).square().mean().backward()
        optimizer.step()

    return step


def _steps_per_second(train: Callable[[], None], seconds: float) -> float:
    for _ in range(5):
        train()
    synchronize(_device())
    begun, steps = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        train()
        steps += 1
    synchronize(_device())
    return steps / (time.perf_counter() - begun)
