"""Memory for encoded bytes that is used again: blocks, each lent until nothing that lies in it is in use any more.

A file's bytes in fresh memory cost a page fault for every 4 kB of it, each of which stops all threads of the process
that have one too; and an allocator gives the memory back to the system as soon as a batch is over.
"""

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 2**22  # from this size on numpy asks for huge pages
ALIGNMENT = 64  # bytes: a cache line, so that no two threads write to the same one


class ByteBlocks:
    """The blocks of one loader. As many are kept as were ever in use at once.

    Whoever holds an array, a view of one or a memoryview holds its block, so nobody has to say when he is done with it.

    Args:
        block_bytes: of a block. An array that is larger gets memory of its own, which is not kept.
    """

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self.block_bytes = block_bytes
        self.made = 0
        """Blocks so far."""
        self._free: deque[NDArray[np.uint8]] = deque()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Have `memory_for` take from these blocks, in the calling thread."""
        token = _room.set(_Room(self))
        try:
            yield
        finally:
            _room.reset(token)

    def lend(self) -> NDArray[np.uint8]:
        """Return a block, which comes back when its last view is gone."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = fresh_memory(self.block_bytes)
            self.made += 1
        # Views of a view are numpy's views of the owner; of an array over a foreign buffer they are views of that one.
        lent = np.frombuffer(memory.data, dtype=np.uint8)
        weakref.finalize(lent, self._free.append, memory).atexit = False
        return lent


def memory_for(size: int) -> NDArray[np.uint8]:
    """Return (size,) uint8 to read a sample's bytes into, not initialized.

    While a loader reads it is memory that it used before; elsewhere it is fresh.
    """
    room = _room.get()
    return fresh_memory(size) if room is None else room.take(size)


def fresh_memory(size: int) -> NDArray[np.uint8]:
    """Return (size,) uint8 that nobody used before, not initialized."""
    return np.empty(size, dtype=np.uint8)


class _Room:
    """What is left of one block, for one thread."""

    def __init__(self, blocks: ByteBlocks) -> None:
        self._blocks, self._begin = blocks, 0
        self._block: NDArray[np.uint8] | None = None

    def take(self, size: int) -> NDArray[np.uint8]:
        if size > self._blocks.block_bytes:
            return fresh_memory(size)
        if self._block is None or self._begin + size > len(self._block):
            self._block, self._begin = self._blocks.lend(), 0
        begin = self._begin
        self._begin += -(-size // ALIGNMENT) * ALIGNMENT
        return self._block[begin : begin + size]


_room: ContextVar[_Room | None] = ContextVar("room", default=None)
