"""Small encoded images, and folders and archives of them, for tests of containers."""

import io
import struct
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def encoded(width: int = 32, height: int = 24, kind: str = "JPEG", seed: int = 0, **options: Any) -> bytes:
    """Return a picture of its own for each seed."""
    random = np.random.default_rng(seed)
    cells = random.integers(0, 256, (max(2, height // 8), max(2, width // 8), 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(cells).resize((width, height), Image.Resampling.BICUBIC).save(file, kind, **options)
    return file.getvalue()


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def write_folder(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


# ---- TFRecord, written from its description: what reads it is compared with DALI's own reader and TensorBoard's ---


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def bytes_feature(*values: bytes) -> bytes:
    return field(1, b"".join(field(1, value) for value in values))


def int64_feature(*values: int, packed: bool = True) -> bytes:
    numbers = [varint(value % 2**64) for value in values]
    return field(3, field(1, b"".join(numbers)) if packed else b"".join(b"\x08" + number for number in numbers))


def float_feature(*values: float) -> bytes:
    return field(2, field(1, struct.pack(f"<{len(values)}f", *values)))


def example(features: Mapping[str, bytes]) -> bytes:
    return field(
        1, b"".join(field(1, field(1, name.encode()) + field(2, feature)) for name, feature in features.items())
    )


def masked_crc(data: bytes) -> bytes:
    """Return TFRecord's checksum, a bit at a time: slow, and nothing that the reader uses."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + masked_crc(length) + data + masked_crc(data)
