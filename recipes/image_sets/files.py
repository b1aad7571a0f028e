"""Image files as uint8 RGB tensors.

`load_image` gives what a person sees in a viewer: grey, palette and CMYK become RGB, transparency is dropped, 16 bits
become the upper 8, the first frame stands for an animation, and the EXIF orientation is applied. Boxes however are in
pixels of one particular frame, and tools disagree on which: torchvision's COCO dataset and MLPerf's reference ignore
EXIF, detectron2 and most labelling tools apply it. So where the annotated size is given the image comes out in that
size: rotated if that gives it, else unrotated if that does, else it is a DataError. An orientation that keeps the size
(upside down, mirrored, or a square image) can't be decided this way and is applied.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torchvision  # noqa: F401  (its import registers torch.ops.image)
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from fasttrain.callbacks.dali_loader import whole_file
from fasttrain.errors import DataError

if TYPE_CHECKING:
    from jaxtyping import UInt8
    from numpy.typing import NDArray

RGB = 3  # torchvision.io.ImageReadMode.RGB
START_OF_SCAN, END_OF_IMAGE = b"\xff\xda", b"\xff\xd9"
EXIF_ORIENTATION = 0x0112
EXIF_SEARCHED_BYTES = 2**17  # the EXIF block of a JPEG is at most 64 KiB long and among the first


def load_image(path: str | Path, annotated_size: tuple[int, int] | None = None) -> UInt8[Tensor, "3 H W"]:
    """Decode an image file to RGB.

    The result may be laid out channels last in memory, as decoders write it; resizing is fastest on that.

    Args:
        path: of the file; what it holds is told by its content, not by its name.
        annotated_size: height and width that the image must have.

    Raises:
        DataError: the file can't be read, is empty, cut off or no image, or has another size.
    """
    return decode_image(path, read_file(path), annotated_size)


def decode_image(
    path: str | Path, data: NDArray[np.uint8], annotated_size: tuple[int, int] | None = None
) -> UInt8[Tensor, "3 H W"]:
    """Decode the bytes of an image file, as `load_image` does; the path is for its errors."""
    pixels, orientation = _decode(path, data)
    upright = _oriented(pixels, orientation)
    if annotated_size is None or upright.shape[1:] == annotated_size:
        return upright
    if pixels.shape[1:] == annotated_size:
        return pixels
    height, width = annotated_size
    turned = f" ({_size(upright)} as its EXIF rotates it)" if upright.shape != pixels.shape else ""
    raise DataError(
        f"'{path}' is {_size(pixels)} pixels{turned}, but its annotation says {width} x {height}; "
        "use the file that was annotated, or correct width, height and boxes."
    )


def _size(pixels: Tensor) -> str:
    return f"{pixels.shape[2]} x {pixels.shape[1]}"


def read_file(path: str | Path) -> NDArray[np.uint8]:
    """Return the bytes of an image file, or raise DataError."""
    try:
        return whole_file(path)
    except FileNotFoundError:
        raise DataError(f"there is no image file '{path}'; was it moved or deleted during the run?") from None
    except OSError as error:
        raise DataError(f"'{path}' can't be read: {error.strerror or error}.") from None


def _decode(path: str | Path, data: NDArray[np.uint8]) -> tuple[Tensor, int]:
    """Return the pixels as stored and the EXIF orientation, 1 where there is none."""
    if not data.size:
        raise DataError(f"'{path}' is empty (0 bytes); download or copy it again.")
    jpeg = data[:3].tobytes() == b"\xff\xd8\xff"
    if jpeg and not _has_end_marker(data):
        raise DataError(f"'{path}' is a JPEG cut off before its end; download or copy it again.")
    decode_jpeg = torchvision_jpeg_decoder() if jpeg else None
    if decode_jpeg is not None:
        try:
            pixels = decode_jpeg(torch.from_numpy(data), RGB)
        except RuntimeError:
            pass  # an uncommon kind or a broken file: Pillow reads more kinds and says what is wrong
        else:
            return pixels, _jpeg_orientation(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # large images and odd metadata; what matters is raised
            return _decode_with_pillow(data.tobytes())
    except UnidentifiedImageError:
        kind = "a damaged JPEG" if jpeg else "no image in a known format"
        raise DataError(f"'{path}' is {kind}; replace the file, or take it out of the set.") from None
    except Exception as error:  # Pillow's readers raise nearly anything on damaged files, struct.error and KeyError too
        reason = str(error).strip().rstrip(".") or type(error).__name__
        raise DataError(f"'{path}' is damaged or cut off ({reason}); download or copy it again.") from None


@lru_cache(maxsize=1)
def torchvision_jpeg_decoder() -> Callable[[Tensor, int], Tensor] | None:
    """Return torchvision's JPEG decoder, which takes half of Pillow's time, or None if this build lacks it.

    The operator is called directly: its Python wrapper warns at each call since 0.29 that TorchCodec will replace it.
    """
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    try:
        decode: Callable[[Tensor, int], Tensor] = torch.ops.image.decode_jpeg
        works = decode(torch.tensor(list(file.getvalue()), dtype=torch.uint8), RGB).shape == (3, 8, 8)
    except (AttributeError, RuntimeError):
        return None
    return decode if works else None


def _has_end_marker(data: NDArray[np.uint8]) -> bool:
    """Tell whether an end-of-image marker follows the last start-of-scan marker; both can't occur inside a scan.

    Decoders notice when bytes run out, but not when a broken copy goes on with zeros, which decode to grey.
    """
    if data[-2:].tobytes() == END_OF_IMAGE:
        return True
    content = data.tobytes()
    return content.rfind(END_OF_IMAGE) > content.rfind(START_OF_SCAN)


def _jpeg_orientation(data: NDArray[np.uint8]) -> int:
    head = data[:EXIF_SEARCHED_BYTES].tobytes()
    if b"Exif\0\0" not in head:
        return 1
    try:
        with Image.open(io.BytesIO(data.tobytes()), formats=("JPEG",)) as image:
            return _orientation(image)
    except Exception:  # a damaged EXIF block doesn't make the image unusable
        return 1


def _orientation(image: Image.Image) -> int:
    value = image.getexif().get(EXIF_ORIENTATION, 1)
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _decode_with_pillow(data: bytes) -> tuple[Tensor, int]:
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        orientation = _orientation(image)
        if image.mode == "F":
            raise ValueError("it holds floating-point pixels, 8 or 16 bits are needed")
        if image.mode.startswith("I"):  # 16 bits, which convert("RGB") would clip at 255
            grey = (np.asarray(image).astype(np.int64).clip(0, 2**16 - 1) >> 8).astype(np.uint8)
            return torch.from_numpy(np.repeat(grey[None], 3, axis=0)), orientation
        pixels = np.array(image.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1), orientation


def _oriented(pixels: Tensor, orientation: int) -> Tensor:
    """Apply an EXIF orientation: 5 to 8 exchange rows and columns first, then each value mirrors some axes."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 2)
    mirrored = {2: (2,), 3: (1, 2), 4: (1,), 6: (2,), 7: (1, 2), 8: (1,)}.get(orientation)
    return pixels.flip(mirrored) if mirrored else pixels
