"""Copies and steps as two queues that run in any order their marks allow: no batch is overwritten while it is read."""

import ctypes
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fasttrain.callbacks.device_prefetch.exchange import Exchange
from fasttrain.callbacks.device_prefetch.mover import DeviceMover, Moved
from fasttrain.callbacks.device_prefetch.streams import ImmediateStreams, Mark


class Point:
    """A mark that is reached when its queue has come there."""

    def __init__(self, device: "Queues") -> None:
        self.device, self.reached = device, False

    def synchronize(self) -> None:
        while not self.reached:
            self.device.run_something()


class Queues(ImmediateStreams):
    """A device whose two streams run one operation at a time, whichever chance takes."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(torch.device("cpu"))
        self.chance = chance
        self.queues: dict[str, deque[Any]] = {"side": deque(), "step": deque()}

    def is_pinned(self, tensor: Tensor) -> bool:
        return False

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.queues["side"].append(lambda: target.copy_(source))

    def mark_side(self) -> Mark:
        return self._mark("side")

    def mark_step(self) -> Mark:
        return self._mark("step")

    def side_waits(self, mark: Mark) -> None:
        self.queues["side"].append(mark)

    def step_waits(self, mark: Mark) -> None:
        self.queues["step"].append(mark)

    def _mark(self, name: str) -> Point:
        point = Point(self)

        def reach() -> None:
            point.reached = True

        self.queues[name].append(reach)
        return point

    def run_something(self) -> None:
        ready = [q for q in self.queues.values() if q and not (isinstance(q[0], Point) and not q[0].reached)]
        assert ready, "each queue waits for the other"
        first = self.chance.choice(ready).popleft()
        if not isinstance(first, Point):
            first()

    def run_all(self) -> None:
        while any(self.queues.values()):
            self.run_something()


class NeverWaits(Queues):
    """The same with a copy that does not wait for the step before."""

    def side_waits(self, mark: Mark) -> None: ...


class StepNeverWaits(Queues):
    def step_waits(self, mark: Mark) -> None: ...


def read_later(streams: Queues, tensor: Tensor, into: list[float]) -> None:
    """Queue a step that reads memory as a kernel does: by its address, while no Python object holds it."""
    address, count = tensor.data_ptr(), tensor.numel()

    def read() -> None:
        values = (ctypes.c_float * count).from_address(address)
        into.append(sum(values))

    streams.queues["step"].append(read)


def run(streams: Queues, depth: int, shapes: list[int], layouts: bool) -> tuple[list[float], list[float]]:
    """Return the sums of the batches, and what the steps read."""
    transforms: list[Callable[[Tensor], Tensor]] = [lambda tensor: tensor.t().contiguous().t()] if layouts else []
    mover = DeviceMover(streams, layouts=lambda: transforms)
    exchange, ahead = Exchange(mover, depth), deque[Moved]()
    host = [torch.full((shape, 2), float(number + 1)) for number, shape in enumerate(shapes)]
    expected, found = [float(tensor.sum()) for tensor in host], list[float]()
    left = deque(host)
    while left or ahead:
        while left and len(ahead) <= depth:
            ahead.append(mover.move([left.popleft()]))
            for _ in range(streams.chance.randrange(4)):
                if any(streams.queues.values()):
                    streams.run_something()
        moved = ahead.popleft()
        exchange.offer(moved)
        read_later(streams, exchange(moved.batch)[0], found)
        del moved
        exchange.finish_batch()
        exchange.hold_back()
    streams.run_all()
    return expected, found


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    depth=st.integers(1, 4),
    shapes=st.lists(st.integers(1, 3), min_size=1, max_size=25),
    layouts=st.booleans(),
)
def test_each_step_reads_its_own_batch(seed: int, depth: int, shapes: list[int], layouts: bool) -> None:
    expected, found = run(Queues(random.Random(seed)), depth, shapes, layouts)
    assert found == expected


@pytest.mark.parametrize("faulty", [NeverWaits, StepNeverWaits])
def test_the_test_would_see_it(faulty: type[Queues]) -> None:
    outcomes = [run(faulty(random.Random(seed)), 2, [3] * 25, layouts=False) for seed in range(20)]
    assert any(found != expected for expected, found in outcomes)


def test_the_host_is_no_farther_ahead_than_it_may_be() -> None:
    streams = Queues(random.Random(0))
    mover = DeviceMover(streams)
    exchange = Exchange(mover, depth=2)
    found = list[float]()
    for number in range(20):
        moved = mover.move([torch.full((2,), float(number))])
        exchange.offer(moved)
        read_later(streams, exchange(moved.batch)[0], found)
        del moved
        exchange.finish_batch()
        exchange.hold_back()
        assert number + 1 - len(found) <= 3
    assert mover.pool.made <= 5
