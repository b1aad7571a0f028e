"""What the first bytes of an image file say, without decoding it: its size, orientation, and whether it is whole.

Formats: JPEG, see `jpeg`, and PNG (W3C PNG, section 11).
"""

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fasttrain.callbacks.dali_loader.jpeg import SOI, jpeg_frame

PNG = b"\x89PNG\r\n\x1a\n"
END_OF_JPEG, END_OF_PNG = b"\xff\xd9", b"IEND\xaeB`\x82"
COMMON_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended and progressive, Huffman-coded
SEARCHED_BYTES = 2**18


@dataclass(frozen=True)
class ImageHeader:
    """The head of a file that every decoder takes: 8 bits a channel, JPEGs in grey or three colours."""

    height: int
    width: int
    orientation: int
    """As in EXIF, 1 to 8."""
    is_whole: bool
    """It ends as its format ends."""

    @property
    def upright_size(self) -> tuple[int, int]:
        """Height and width once it is turned as the orientation says."""
        return (self.width, self.height) if self.orientation >= 5 else (self.height, self.width)


def image_header(data: NDArray[np.uint8]) -> ImageHeader | None:
    """Return what a file's bytes, (length,) uint8, say of it; None for other formats, uncommon kinds and damage."""
    view = data.data
    try:
        if view[: len(SOI)] == SOI:
            return _of_jpeg(view)
        if view[: len(PNG)] == PNG:
            return _of_png(view)
    except (struct.error, ValueError):  # it ends before its header does
        pass
    return None


def _of_jpeg(data: memoryview) -> ImageHeader | None:
    frame = jpeg_frame(data)
    if frame is None or frame.marker not in COMMON_FRAMES or frame.bits != 8 or frame.components not in (1, 3):
        return None
    return ImageHeader(frame.height, frame.width, frame.orientation, data[-2:] == END_OF_JPEG)


def _of_png(data: memoryview) -> ImageHeader | None:
    width, height, bits = struct.unpack_from(">IIB", data, 16)
    if bits > 8 or b"eXIf" in data[:SEARCHED_BYTES].tobytes():
        return None
    return ImageHeader(height, width, 1, data[-8:] == END_OF_PNG)
