"""What the first bytes of an image file say, without decoding it: its size, orientation, and whether it is whole.

Formats: JPEG (ITU-T T.81, annex B), whose EXIF orientation is TIFF's tag 0x0112 in the first directory of an APP1
segment (CIPA DC-008), and PNG (W3C PNG, section 11).
"""

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

JPEG, PNG, EXIF = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"Exif\0\0"
END_OF_JPEG, END_OF_PNG = b"\xff\xd9", b"IEND\xaeB`\x82"
SIZE_SEGMENTS = (0xC0, 0xC1, 0xC2)  # baseline, extended and progressive, Huffman-coded
APP1, START_OF_SCAN, ORIENTATION = 0xE1, 0xDA, 0x0112
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
        if view[: len(JPEG)] == JPEG:
            return _of_jpeg(view)
        if view[: len(PNG)] == PNG:
            return _of_png(view)
    except (struct.error, IndexError):  # it ends before its header does
        pass
    return None


def _of_jpeg(data: memoryview) -> ImageHeader | None:
    orientation, place = 1, 2
    while data[place] == 0xFF:
        kind = data[place + 1]
        if kind == 0xFF:  # a fill byte
            place += 1
            continue
        (length,) = struct.unpack_from(">H", data, place + 2)
        if kind in SIZE_SEGMENTS:
            bits, height, width, components = struct.unpack_from(">BHHB", data, place + 4)
            if bits != 8 or components not in (1, 3) or not height:
                return None
            return ImageHeader(height, width, orientation, data[-2:] == END_OF_JPEG)
        if kind == START_OF_SCAN or length < 2:
            return None
        if kind == APP1 and data[place + 4 : place + 10] == EXIF:
            orientation = _orientation(data[place + 10 : place + 2 + length])
        place += 2 + length
    return None


def _of_png(data: memoryview) -> ImageHeader | None:
    width, height, bits = struct.unpack_from(">IIB", data, 16)
    if bits > 8 or b"eXIf" in data[:SEARCHED_BYTES].tobytes():
        return None
    return ImageHeader(height, width, 1, data[-8:] == END_OF_PNG)


def _orientation(tiff: memoryview) -> int:
    """Return the orientation in an EXIF block, 1 where there is none or the block is damaged."""
    order = {b"II": "<", b"MM": ">"}.get(bytes(tiff[:2]))
    if order is None:
        return 1
    try:
        (directory,) = struct.unpack_from(f"{order}I", tiff, 4)
        (entries,) = struct.unpack_from(f"{order}H", tiff, directory)
        for number in range(entries):
            tag, _, _, value = struct.unpack_from(f"{order}HHIH", tiff, directory + 2 + 12 * number)
            if tag == ORIENTATION:
                return value if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1
