"""Memory that another process can map, without a name."""

import os
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class NamelessMemory:
    """Bytes behind a file descriptor; nothing is left of them when all who hold it are gone, however they went.

    It is Linux's memfd, which also knows nothing of the size of /dev/shm, 64 MB in most containers; elsewhere a
    temporary file whose name is gone at once.
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("fasttrain-scoring")
        else:
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())
        self.bytes = 0
        self._open = True

    def append(self, data: Any) -> None:
        """Copy a buffer behind what is there. Lets go of the GIL meanwhile.

        Raises:
            OSError: there is no room.
        """
        view = memoryview(data).cast("B")
        while view:
            written = os.pwrite(self.descriptor, view, self.bytes)
            self.bytes, view = self.bytes + written, view[written:]

    def read(self) -> bytes:
        """Return a copy of all of it."""
        parts, position = [], 0
        while position < self.bytes:  # Linux reads at most 2 GB at a time
            parts.append(os.pread(self.descriptor, self.bytes - position, position))
            position += len(parts[-1])
        return b"".join(parts)

    def close(self) -> None:
        """Let go of it."""
        if self._open:
            self._open = False
            os.close(self.descriptor)


def joint_shape(parts: Sequence[NDArray[Any]]) -> tuple[int, ...]:
    """Return the shape of the parts one behind the other; (0,) for none.

    Raises:
        ValueError: they differ in more than their first dimension, or in their type.
    """
    if not parts:
        return (0,)
    kinds = {(part.dtype, part.shape[1:]) for part in parts}
    if len(kinds) > 1 or not parts[0].ndim or parts[0].dtype.hasobject:
        raise ValueError(
            "rows to be scored are arrays of numbers that differ in their first dimension alone; found "
            f"{sorted(kinds, key=str)}."
        )
    return (sum(len(part) for part in parts), *parts[0].shape[1:])


def memory_of(parts: Sequence[NDArray[Any]]) -> NamelessMemory:
    """Return a copy of the arrays one behind the other.

    Raises:
        OSError: there is no room.
    """
    memory = NamelessMemory()
    try:
        for part in parts:
            if part.size:
                memory.append(np.ascontiguousarray(part).reshape(-1).view(np.uint8))
    except OSError:
        memory.close()
        raise
    return memory
