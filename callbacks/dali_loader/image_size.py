"""The size of an encoded image, from the first bytes of its file.

What DALI's decoders give is meant: an EXIF orientation that turns the image by 90 degrees exchanges width and height.
"""

import io
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fasttrain.callbacks.dali_loader.jpeg import SOI, jpeg_frame
from fasttrain.errors import DataError

HEAD_BYTES = 4096  # holds the frame header of most JPEGs; those with a thumbnail or a colour profile have it later
LONG_HEAD_BYTES = 2**18

UNKNOWN = (0, 0)


def image_size(head: Callable[[int], bytes]) -> tuple[int, int]:
    """Return the width and height of an encoded image, `UNKNOWN` for what is no image or a damaged one.

    Args:
        head: gives the file's first n bytes, all of it for an n beyond its end.
    """
    for count in (HEAD_BYTES, LONG_HEAD_BYTES, 2**62):
        data = head(count)
        if data[:2] != SOI:
            return _size_by_pillow(head(2**62))
        try:
            found = _jpeg_size(data)
        except ValueError:
            return UNKNOWN
        if found is not None:
            return found
        if len(data) < count:
            break
    return UNKNOWN


class ImageSizes:
    """Widths and heights of a set's images, read when they are first asked for. Safe to share between threads.

    Args:
        head: gives the first bytes of an image, by its index and their number.
        known: (images, 2) int32, width and height, (0, 0) where unknown; filled in place.
        name: of an image, for errors.
    """

    def __init__(self, head: Callable[[int, int], bytes], known: NDArray[np.int32], name: Callable[[int], str]) -> None:
        self._head, self._known, self._name = head, known, name

    def __call__(self, indices: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return (n, 2): width and height of the images at n indices.

        Raises:
            DataError: one of them has no readable header; the message names it.
        """
        sizes = self._known[indices]
        for row in np.flatnonzero(sizes[:, 0] == 0).tolist():
            index = int(indices[row])
            found = image_size(lambda count, index=index: self._head(index, count))  # type: ignore[misc]
            if found == UNKNOWN:
                raise DataError(
                    f"'{self._name(index)}' has no header of an image that could be read; replace the image, or leave "
                    "it out."
                )
            sizes[row] = self._known[index] = found
        return sizes


def _jpeg_size(head: bytes) -> tuple[int, int] | None:
    """Return width and height, None if the frame lies beyond these bytes; ValueError for damage."""
    frame = jpeg_frame(head)
    if frame is None:
        return None
    return (frame.height, frame.width) if frame.orientation >= 5 else (frame.width, frame.height)


def _size_by_pillow(data: bytes) -> tuple[int, int]:
    try:
        with Image.open(io.BytesIO(data)) as image:
            return image.size
    except Exception:  # Pillow's readers raise nearly anything on damaged files
        return UNKNOWN
