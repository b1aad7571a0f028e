"""Batches of encoded samples, read by threads ahead of their use and handed over in order."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasttrain.order import SampleKey

Keys = Sequence[SampleKey]


@dataclass(frozen=True)
class HostBatch:
    """What a pipeline is fed for one batch.

    Raises:
        ValueError: a parameter has another number of rows than there are samples.
    """

    keys: Keys
    encoded: list[NDArray[np.uint8]]
    parameters: Mapping[str, NDArray[Any]]

    def __post_init__(self) -> None:
        for name, values in self.parameters.items():
            if len(values) != len(self.keys):
                raise ValueError(
                    f"a DALI loader's graph gave {len(values)} rows of '{name}' for {len(self.keys)} samples; it must "
                    "give one for each."
                )

    def only(self, place: int) -> "HostBatch":
        """Return one sample of it as a batch."""
        return self._rows([place])

    def filled(self, size: int) -> "HostBatch":
        """Return its samples over and over, so many in all."""
        return self._rows([row % len(self.keys) for row in range(size)])

    def _rows(self, rows: list[int]) -> "HostBatch":
        chosen = {name: values[rows] for name, values in self.parameters.items()}
        return HostBatch([self.keys[row] for row in rows], [self.encoded[row] for row in rows], chosen)


class ReadAhead:
    """The batches of one pass over the data.

    A thread reads a whole batch: on a fast disk that is the least work, and on a slow one as many requests are out as
    there are threads.

    Args:
        batches: keys, batch by batch; drawn from in the calling thread only.
        read: makes a batch of keys; called in the pool's threads.
        pool: that has `ahead` threads.
        ahead: batches that are read before they are asked for.
    """

    def __init__(
        self, batches: Iterator[Keys], read: Callable[[Keys], HostBatch], pool: ThreadPoolExecutor, ahead: int
    ) -> None:
        self._batches, self._read, self._pool = batches, read, pool
        self._reading: deque[Future[HostBatch]] = deque()
        self._back: deque[HostBatch] = deque()
        for _ in range(ahead):
            self._read_another()

    def is_ready(self) -> bool:
        """Whether `take` has a batch without waiting."""
        if self._back:
            return True
        return bool(self._reading) and self._reading[0].done() and self._reading[0].exception() is None

    def take(self) -> HostBatch | None:
        """Return the next batch, or None when there is no other.

        Raises:
            Exception: what reading this batch raised, a DataError for instance.
        """
        if self._back:
            return self._back.popleft()
        if not self._reading:
            return None
        batch = self._reading.popleft()
        self._read_another()
        return batch.result()

    def put_back(self, batches: Sequence[HostBatch]) -> None:
        """Have batches that were taken, oldest first, taken again before all others."""
        self._back.extendleft(reversed(batches))

    def cancel(self) -> None:
        """Read nothing more, and wait for what is being read."""
        for future in self._reading:
            future.cancel()
        for future in self._reading:
            if not future.cancelled():
                future.exception()
        self._reading.clear()

    def _read_another(self) -> None:
        keys = next(self._batches, None)
        if keys is not None:
            self._reading.append(self._pool.submit(self._read, keys))
