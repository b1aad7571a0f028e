"""Prefetching without Lightning: an iterable of device batches for any loop."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from fasttrain.callbacks.device_prefetch.ahead import Ahead
from fasttrain.callbacks.device_prefetch.exchange import Exchange
from fasttrain.callbacks.device_prefetch.mover import DeviceMover, Moved, Transform
from fasttrain.callbacks.device_prefetch.streams import CudaStreams, Streams


class DeviceBatches:
    """A loader's batches, on the device when they are handed out: `for batch in DeviceBatches(loader, device)`.

    A batch's memory is written again once the next one has been asked for, the device has done what the current stream
    was given by then, and nothing in Python holds the batch any more. Another stream that reads it has to be waited for
    by the current one.

    Args:
        loader: iterated in a thread, all but its first batch.
        device: a CUDA device.
        depth: batches ahead.
        channels_last, dtype, prepare: as `DeviceMover` takes them.
        streams: those of another device, for tests.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str,
        depth: int = 2,
        channels_last: bool = False,
        dtype: torch.dtype | None = None,
        prepare: Transform | None = None,
        streams: Streams | None = None,
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth is {depth}; at least 1 batch has to be ahead.")
        self.loader, self.depth = loader, depth
        self.mover = DeviceMover(streams or CudaStreams(torch.device(device)), channels_last, dtype, prepare=prepare)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        exchange = Exchange(self.mover, self.depth)
        try:
            first = self.mover.move(next(batches))
        except StopIteration:
            return
        ahead: Ahead[Moved] = Ahead(lambda: self.mover.move(next(batches)), self.depth)
        moved: Moved | None = first
        try:
            while moved is not None:
                exchange.offer(moved)
                yield exchange(moved.batch)
                exchange.finish_batch()
                exchange.hold_back()
                moved = _next_of(ahead)
        finally:
            ahead.stop()
            exchange.drop()


def _next_of(ahead: Ahead[Moved]) -> Moved | None:
    try:
        return next(ahead)
    except StopIteration:
        return None
