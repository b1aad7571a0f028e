"""Batches moved ahead of the step, without Lightning: any structure, memory used again, any loop, and the thread."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from batch_structures import STRUCTURES
from prefetched_fits import CPU, no_thread_is_left
from torch import Tensor, nn

from fasttrain.batches import flatten, map_tensors, tensors_in
from fasttrain.callbacks import DeviceBatches
from fasttrain.callbacks.channels_last import batch_to_channels_last
from fasttrain.callbacks.device_prefetch.ahead import Ahead
from fasttrain.callbacks.device_prefetch.mover import DeviceMover
from fasttrain.callbacks.device_prefetch.reference import TOLERANCE, moved_plainly
from fasttrain.callbacks.device_prefetch.streams import ImmediateStreams
from fasttrain.errors import DataError

_no_thread_is_left = pytest.fixture(autouse=True)(no_thread_is_left)


def step_takes(mover: DeviceMover, batch: Any) -> Any:
    return mover.take(mover.move(batch), batch)


@pytest.mark.parametrize("make", STRUCTURES.values(), ids=STRUCTURES)
def test_any_structure_arrives_as_it_was(make: Callable[[], Any]) -> None:
    batch = make()
    arrived = step_takes(DeviceMover(ImmediateStreams(CPU)), batch)
    assert type(arrived) is type(batch)
    assert flatten(arrived)[1] == flatten(batch)[1]
    for tensor, host in zip(tensors_in(arrived), tensors_in(batch), strict=True):
        assert torch.equal(tensor, host)
        assert tensor.data_ptr() != host.data_ptr() or tensor.numel() == 0


IMAGES: dict[str, Callable[[], Tensor]] = {
    "images": lambda: torch.rand(2, 3, 4, 5),
    "bytes": lambda: torch.randint(256, (2, 3, 4, 5), dtype=torch.uint8),
    "volumes": lambda: torch.rand(2, 3, 4, 5, 6),
    "one channel": lambda: torch.rand(2, 1, 4, 5),
    "classes": lambda: torch.randint(9, (2, 3, 4, 5)),
    "channels_last": lambda: torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "strided": lambda: torch.rand(4, 3, 4, 10)[::2, :, :, ::2],
    "expanded": lambda: torch.rand(1, 3, 4, 5).expand(2, 3, 4, 5),
    "number": lambda: torch.tensor(3.5),
    "empty": lambda: torch.rand(0, 3, 4, 5),
}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("make", IMAGES.values(), ids=IMAGES)
def test_cast_and_layout_are_the_references(
    make: Callable[[], Tensor], channels_last: bool, dtype: torch.dtype | None
) -> None:
    mover = DeviceMover(ImmediateStreams(CPU), channels_last, dtype)
    for _ in range(3):  # into memory that was used before, too
        host = make()
        arrived, expected = step_takes(mover, [host])[0], moved_plainly(host, CPU, channels_last, dtype)
        tolerance = TOLERANCE.get(expected.dtype, 0.0)
        torch.testing.assert_close(arrived, expected, rtol=tolerance, atol=tolerance)
        assert arrived.is_contiguous(memory_format=torch.channels_last) or not channels_last or host.dim() != 4 or (
            host.dtype == torch.int64
        )  # fmt: skip
        if (
            host.is_contiguous()
        ):  # of others a view's strides are made dense, as `.to(device)` does from device to device
            assert arrived.stride() == expected.stride()


def test_the_layout_that_comes_later_is_made_at_once() -> None:
    mover = DeviceMover(ImmediateStreams(CPU), layouts=lambda: [batch_to_channels_last])
    arrived = step_takes(mover, {"images": torch.rand(2, 3, 4, 5), "labels": torch.arange(2)})
    assert batch_to_channels_last(arrived)["images"] is arrived["images"], "nothing is left to do"


def test_what_stays_on_the_host() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.rand(2), torch.rand(1)])
    leaf = torch.rand(2, requires_grad=True)
    sparse = torch.eye(2).to_sparse()
    batch = [packed, leaf, sparse, torch.rand(2)]
    arrived = step_takes(DeviceMover(ImmediateStreams(CPU)), batch)
    assert [one is other for one, other in zip(arrived, batch, strict=True)] == [True, True, True, False]


def test_memory_is_used_again_when_nobody_holds_it() -> None:
    mover = DeviceMover(ImmediateStreams(CPU))
    addresses = set()
    for value in range(10):
        moved = mover.move([torch.full((3,), float(value))])
        arrived = mover.take(moved, moved.batch)
        assert arrived[0].tolist() == [value] * 3
        addresses.add(arrived[0].data_ptr())
        mover.release(moved)
        del arrived, moved
    assert len(addresses) == mover.pool.made == 1
    assert mover.pool.left == 0


@pytest.mark.parametrize(
    "keep", [lambda x: x, lambda x: x[:1], lambda x: (x * torch.ones(3, requires_grad=True)).sum()]
)
def test_what_somebody_keeps_is_not_overwritten(keep: Callable[[Tensor], Any]) -> None:
    """A tensor of the batch, a view of it, or a loss whose backward needs it."""
    mover = DeviceMover(ImmediateStreams(CPU))
    kept = []
    for value in range(10):
        moved = mover.move([torch.full((3,), float(value))])
        kept.append(keep(mover.take(moved, moved.batch)[0]))
        mover.release(moved)
        del moved
    first = [float(each.detach().flatten()[0]) for each in kept]
    assert first in ([float(v) for v in range(10)], [3.0 * v for v in range(10)])
    assert mover.pool.made == 10
    assert mover.pool.left > 0, "the memory is theirs"


def test_changing_shapes_do_not_pile_up() -> None:
    mover = DeviceMover(ImmediateStreams(CPU))
    for rows in range(1, 200):
        moved = mover.move([torch.ones(rows), torch.ones(4)])
        mover.release(moved)
        del moved
    assert len(mover.pool._free) <= 17
    assert sum(map(len, mover.pool._free.values())) <= 20


def test_a_tensor_that_is_in_a_batch_twice_is_copied_once() -> None:
    host = torch.rand(3)
    mover = DeviceMover(ImmediateStreams(CPU))
    arrived = step_takes(mover, {"a": host, "b": host})
    assert arrived["a"] is arrived["b"]
    assert mover.pool.made == 1


@pytest.mark.parametrize("change", [
    lambda batch: batch.update(x=batch["x"] + 1),
    lambda batch: batch["x"].add_(1),
    lambda batch: batch.update(new=torch.ones(1)),
])  # fmt: skip
def test_what_a_hook_changed_after_it_was_moved_counts(change: Callable[[Any], Any]) -> None:
    mover = DeviceMover(ImmediateStreams(CPU), prepare=lambda batch: "prepared for the batch as it was")
    batch = {"x": torch.zeros(2), "y": torch.zeros(2)}
    moved = mover.move(batch)
    change(batch)
    arrived = mover.take(moved, batch)
    assert {key: value.tolist() for key, value in arrived.items()} == {k: v.tolist() for k, v in batch.items()}
    assert arrived["y"] is not batch["y"]


def test_any_loop() -> None:
    made = [{"x": torch.full((2, 3), float(i)), "name": str(i)} for i in range(7)]
    seen = [
        (batch["x"].mean().item(), batch["name"]) for batch in DeviceBatches(made, CPU, streams=ImmediateStreams(CPU))
    ]
    assert seen == [(float(i), str(i)) for i in range(7)]
    assert list(DeviceBatches([], CPU, streams=ImmediateStreams(CPU))) == []
    for batch in DeviceBatches(made, CPU, streams=ImmediateStreams(CPU)):
        if batch["name"] == "2":
            break  # the fixture sees that no thread is left
    with pytest.raises(ValueError, match=r"^depth is 0; at least 1 batch has to be ahead\.$"):
        DeviceBatches(made, CPU, depth=0, streams=ImmediateStreams(CPU))


def test_it_pulls_so_far_ahead_and_no_farther() -> None:
    pulled: list[int] = []
    arrived = threading.Semaphore(0)

    def pull() -> int:
        pulled.append(len(pulled))
        arrived.release()
        return pulled[-1]

    ahead = Ahead(pull, depth=2, most=5)
    assert arrived.acquire(timeout=10)
    assert arrived.acquire(timeout=10)
    assert not arrived.acquire(timeout=0.05)
    assert next(ahead) == 0
    assert arrived.acquire(timeout=10)
    assert not arrived.acquire(timeout=0.05)
    assert [next(ahead) for _ in range(4)] == [1, 2, 3, 4]
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(ahead)
    assert pulled == [0, 1, 2, 3, 4]
    ahead.stop()


def test_what_it_raises_comes_in_its_turn() -> None:
    items: list[Any] = [1, 2, DataError("image 3 is broken"), 4]

    def pull() -> Any:
        item = items.pop(0)
        if isinstance(item, Exception):
            raise item
        return item

    ahead = Ahead(pull, depth=3)
    assert [next(ahead), next(ahead)] == [1, 2]
    for _ in range(2):
        with pytest.raises(DataError, match="image 3 is broken"):
            next(ahead)
    assert items == [4]
    ahead.stop()


def test_the_reference_leaves_other_leaves_alone() -> None:
    batch = {"x": torch.rand(2), "name": "a", "n": 3}
    assert map_tensors(moved_plainly(batch, CPU), torch.Tensor.tolist) == map_tensors(batch, torch.Tensor.tolist)
