"""The frame of a JPEG and the way up that its EXIF block says, from its first bytes, without decoding it.

Formats: ITU-T T.81, annex B, and for the orientation TIFF's tag 0x0112 in the first directory of an APP1 segment
(CIPA DC-008).
"""

import struct
from dataclasses import dataclass

SOI, EXIF = b"\xff\xd8", b"Exif\0\0"
START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # the three are tables and an extension
WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD9)})
END_OR_SCAN = frozenset({0xD9, 0xDA})
FILL, APP1, ORIENTATION = 0xFF, 0xE1, 0x0112


@dataclass(frozen=True)
class Frame:
    """What a decoder is told before it decodes."""

    marker: int
    """Of the coding: 0xC0 baseline, 0xC1 extended, 0xC2 progressive, others are rare."""
    bits: int
    """Of a sample."""
    height: int
    width: int
    components: int
    orientation: int
    """As in EXIF, 1 to 8; from 5 on rows and columns are exchanged."""


def jpeg_frame(data: bytes | memoryview) -> Frame | None:
    """Return the frame of a JPEG, None if it lies beyond these bytes.

    Raises:
        ValueError: this is no JPEG, or it is damaged before its frame.
    """
    if data[:2] != SOI:
        raise ValueError("it does not begin as a JPEG does")
    orientation, at = 1, 2
    while at + 4 <= len(data):
        if data[at] != 0xFF:
            raise ValueError(f"there is no marker at byte {at}")
        marker = data[at + 1]
        if marker == FILL or marker in WITHOUT_LENGTH:
            at += 1 if marker == FILL else 2
            continue
        if marker in END_OR_SCAN:
            raise ValueError("there is no frame before the scan")
        (length,) = struct.unpack_from(">H", data, at + 2)
        if length < 2:
            raise ValueError(f"the segment at byte {at} has a length of {length}")
        end = at + 2 + length
        if marker in START_OF_FRAME or marker == APP1:
            if end > len(data):
                return None
            if marker in START_OF_FRAME:
                return _frame(marker, bytes(data[at + 4 : end]), orientation)
            if data[at + 4 : at + 10] == EXIF and orientation == 1:
                orientation = _orientation(bytes(data[at + 10 : end]))
        at = end
    return None


def _frame(marker: int, segment: bytes, orientation: int) -> Frame:
    if len(segment) < 6:
        raise ValueError("its frame is cut off")
    bits, height, width, components = struct.unpack_from(">BHHB", segment)
    if not height or not width:
        raise ValueError("its frame has no size")
    return Frame(marker, bits, height, width, components, orientation)


def _orientation(tiff: bytes) -> int:
    """Return the orientation in an EXIF block, 1 where there is none or the block is damaged."""
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
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
