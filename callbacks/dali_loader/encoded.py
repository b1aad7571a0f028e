"""Encoded samples by index: where the bytes of an image, a recording or a volume come from before DALI decodes them."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fasttrain.errors import DataError


class EncodedSamples(Protocol):
    """A set of encoded files in any container. `read` is called from several threads at once."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def read(self, index: int) -> NDArray[np.uint8]:
        """Return one sample's encoded bytes, (length,) uint8.

        Raises:
            DataError: they can't be read; the message names the file.
        """

    def name(self, index: int) -> str:
        """Return what a user would look for to find this sample: its file, or the member and its archive."""


def whole_file(path: str | Path) -> NDArray[np.uint8]:
    """Return a file's bytes, (length,) uint8, or raise OSError.

    In four calls of the system: `np.fromfile` makes twenty, and takes twice as long for a photograph.
    """
    file = os.open(path, os.O_RDONLY)
    try:
        data = np.empty(os.fstat(file).st_size, dtype=np.uint8)
        have = 0
        while have < len(data) and (got := os.readv(file, [data[have:].data])):
            have += got
        return data[:have]
    finally:
        os.close(file)


class EncodedFiles:
    """One file a sample."""

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> NDArray[np.uint8]:
        """Return the whole file, (length,) uint8."""
        try:
            return whole_file(self.paths[index])
        except OSError as error:
            raise DataError(f"'{self.paths[index]}' can't be read: {error.strerror or error}.") from error

    def name(self, index: int) -> str:
        """Return the file's path."""
        return str(self.paths[index])
