"""Moved batches between the loader that hands them out and the step that takes them."""

from collections import deque
from typing import Any

from fasttrain.batches import tensors_in
from fasttrain.callbacks.device_prefetch.mover import DeviceMover, Moved
from fasttrain.callbacks.device_prefetch.streams import Mark

MOST_OFFERED = 3
"""Lightning keeps one batch back of a loader without a length; what was offered before that is not coming."""


class Exchange:
    """Gives the step the device's batch in the place of the host's.

    Between the two a hook may have changed the host's batch: tensors that are not those that were moved, or that were
    written to since, are left for Lightning to move.

    Args:
        mover: has moved what is offered.
        depth: batches ahead; `hold_back` lets the host be so many steps ahead of the device too.
    """

    def __init__(self, mover: DeviceMover, depth: int) -> None:
        self.mover, self.depth = mover, depth
        self.exchanged = 0
        """Batches that the step found on the device."""
        self.unmoved = 0
        """Batches in which a tensor was left for Lightning to move, or that were there already."""
        self._offered: deque[Moved] = deque()
        self._in_use: Moved | None = None
        self._in_flight: deque[Mark] = deque()

    def offer(self, moved: Moved) -> None:
        """Take note of a batch whose turn has come, or will after another."""
        self._offered.append(moved)
        while len(self._offered) > MOST_OFFERED:
            self._release(self._offered.popleft())

    def __call__(self, batch: Any) -> Any:
        """Return the device's batch for a host's that was offered; any other as it is."""
        leaves = list(tensors_in(batch))
        found = next((moved for moved in self._offered if any(map(moved.has, leaves))), None)
        if found is None:
            self.unmoved += 1
            return batch
        self.finish_batch()
        while (first := self._offered.popleft()) is not found:
            self._release(first)
        self._in_use = found
        exchanged = self.mover.take(found, batch)
        is_moved = all(tensor.device.type == self.mover.streams.device.type for tensor in tensors_in(exchanged))
        self.exchanged += is_moved
        self.unmoved += not is_moved
        return exchanged

    def finish_batch(self) -> None:
        """Let the memory of the batch in use be written again once the device has done what it was given so far."""
        if self._in_use is not None:
            self._in_flight.append(self._release(self._in_use))
            self._in_use = None

    def hold_back(self) -> None:
        """Have the host wait while it is more than `depth` steps ahead: each keeps a batch in pinned memory."""
        while len(self._in_flight) > self.depth:
            self._in_flight.popleft().synchronize()

    def drop(self) -> None:
        """Give up what was offered and not taken."""
        self.finish_batch()
        while self._offered:
            self._release(self._offered.popleft())
        self._in_flight.clear()

    def _release(self, moved: Moved) -> Mark:
        return self.mover.release(moved)
