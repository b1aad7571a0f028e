"""Seconds of COCO's scorers on an evaluation of OpenImages' size, and what scoring costs the training beside it."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec

import torch
from torch import nn

from fasttrain.bench import Case
from fasttrain.callbacks.async_scoring import bench_scorers
from fasttrain.callbacks.async_scoring.bench_set import DETECTIONS_PER_IMAGE, OPENIMAGES_VAL_IMAGES, generate
from fasttrain.callbacks.scored_elsewhere.evaluation import NotScored, Outcome, Tag
from fasttrain.callbacks.scored_elsewhere.scorer import AsyncScorer, Rows
from fasttrain.errors import ConfigError, OptimizationError, nearest
from fasttrain.measure import Row, make_row, synchronize

ROOM = "async_scoring"
SCORERS = ("hotcoco", "faster_coco_eval", "pycocotools", "torchmetrics")
"""By the time they take. The first that is asked for is the one that the others' numbers are compared with."""
SCORE = f"{bench_scorers.__file__}:score"


def cases() -> list[Case]:
    """Return the room's bench cases: an evaluation of MLPerf's, a tenth of it, and one that takes seconds."""
    size = f"{OPENIMAGES_VAL_IMAGES:,} images with {DETECTIONS_PER_IMAGE} detections each, scored beside training"
    slow = "pycocotools and torchmetrics need many minutes, and are stopped after limit_seconds of all"
    return [
        Case(ROOM, "openimages_val", f"{size}; {slow}", partial(side_by_side, "openimages_val")),
        Case(ROOM, "openimages_tenth", f"a tenth of that, by every scorer; {slow}", openimages_tenth),
        Case(ROOM, "generated_small", "300 images with 100 detections each, by every scorer", generated_small),
    ]


def openimages_tenth(
    *, images: int = OPENIMAGES_VAL_IMAGES // 10, scorers: str = "installed", limit_seconds: float = 360.0
) -> Iterator[Row]:
    """Yield the rows of all scorers on a set on which the slow ones come to an end in minutes."""
    yield from side_by_side("openimages_tenth", images=images, scorers=scorers, limit_seconds=limit_seconds)


def generated_small(*, images: int = 300, detections: int = 100, baseline_seconds: float = 2.0) -> Iterator[Row]:
    """Yield the rows of all scorers on a small set."""
    yield from side_by_side(
        "generated_small", images=images, detections=detections, baseline_seconds=baseline_seconds
    )  # fmt: skip


def side_by_side(
    case: str,
    *,
    images: int = OPENIMAGES_VAL_IMAGES,
    detections: int = DETECTIONS_PER_IMAGE,
    scorers: str = "installed",
    limit_seconds: float = 360.0,
    baseline_seconds: float = 5.0,
) -> Iterator[Row]:
    """Yield each scorer's seconds, the share of them in which training stood still, and training's speed meanwhile.

    A small network trains with one host thread; its speed without scoring is taken before and after each. The seconds
    are the score function's own, beside the training loop. `max_difference` is that of the twelve numbers from the
    first scorer's.

    Each may take half of what is left of `limit_seconds`, and the last all of it. One that isn't done then is stopped:
    in the place of its `seconds` comes `seconds_at_least`, and the shares are of the time that it had.

    Raises:
        ConfigError: a scorer that isn't known.
        OptimizationError: a scorer fails.
    """
    names = _names(scorers)
    truth, rows = generate(images, detections)
    train = _training()
    expected: dict[str, float] | None = None
    note = f"{images} images, {detections} detections each, generated; one network on {_device()} beside it"
    if scorers == "installed" and len(names) < len(SCORERS):
        note += f"; not installed: {', '.join(name for name in SCORERS if name not in names)}"
    for number, name in enumerate(names, start=1):
        limit = limit_seconds / (2 if number < len(names) else 1)
        before = _steps_per_second(train, baseline_seconds)
        work = {"scorer": name, "truth": truth}
        with AsyncScorer(SCORE, work, timeout_seconds=limit, tell=_ignore, attempts=1) as scoring:
            scoring.submit([], Tag(0, 0))  # loads what it needs
            scoring.drain()
            outcome, stalled, speed = _score_beside(scoring, rows, train)
        after = _steps_per_second(train, baseline_seconds)
        row = partial(make_row, ROOM, case, name, note=note)
        seconds = limit if isinstance(outcome, NotScored) else outcome.seconds
        limit_seconds -= seconds
        if isinstance(outcome, NotScored):
            yield row("seconds_at_least", "s", [seconds])
        else:
            expected = expected or outcome.scores
            yield row("seconds", "s", [seconds])
            yield row("seconds_until_it_arrived", "s", [outcome.arrived_at - outcome.submitted_at])
            yield row("max_difference", "1", [max(abs(outcome.scores[key] - expected[key]) for key in expected)])
        yield row("stall_fraction", "1", [stalled / seconds])
        yield row("speed_while_scoring", "1", [speed / ((before + after) / 2)])


def _names(scorers: str) -> list[str]:
    if scorers == "installed":
        return [name for name in SCORERS if find_spec(name) is not None]
    names = [name.strip() for name in scorers.split(",")]
    if unknown := [name for name in names if name not in SCORERS]:
        raise ConfigError(f"there is no scorer '{unknown[0]}'; {nearest(unknown[0], SCORERS)}")
    return names


def _score_beside(scoring: AsyncScorer, rows: Rows, train: Callable[[], None]) -> tuple[Outcome, float, float]:
    """Return the outcome, the seconds in which training stood still for it, and steps a second until it arrived.

    Raises:
        OptimizationError: the scorer failed by something else than its time.
    """
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
    (outcome,) = outcomes
    if isinstance(outcome, NotScored) and "hung" not in outcome.faults[-1]:
        raise OptimizationError(f"the bench's scorer failed: {outcome.faults[-1]}.")
    return outcome, stalled, steps / (time.perf_counter() - begun)


def _ignore(fault: str) -> None:
    """It is in the outcome."""


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
