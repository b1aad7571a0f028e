"""The obvious version: decode, resize and mirror with torchvision and torch, an image at a time."""

import io
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
import torchvision  # noqa: F401  (its import registers torch.ops.image)
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

TOLERANCE = {"cpu": (1.0, 0.5), "gpu": (4.0, 0.1)}
"""Largest and mean difference in grey levels of an image, by where DALI decodes; of floats, after denormalizing.

On a CPU both decode with libjpeg-turbo, and the resize rounds otherwise: DALI to the nearest level from floats, torch
from 16-bit fixed point.

On a GPU DALI is compared with itself on the CPU, where colours are treated as the GPU treats them. Most JPEGs have half
as many samples of colour as of brightness each way. libjpeg-turbo interpolates between them, and so does the GPU with
`fancy_upsampling`; else it repeats them (`repeated_colours`), which at an edge of colour makes any difference to
single pixels, and 6 grey levels on average in a picture that is nothing but edges of colour, 0.5 in one like a
photograph. What is left is how the blocks' inverse transform is rounded: on an H200 at most 1 level and 0.001 on
average by its decoder unit, 3 and 0.04 by its cores, to which progressive files go in any case; inside as on the edge
of a window, whether that or the whole image is decoded.
"""


def reference(encoded: Sequence[NDArray[np.uint8]], image_size: tuple[int, int], flipped: Sequence[bool]) -> Tensor:
    """Return JPEGs as uint8 (B, 3, H, W), RGB, resized to one size and mirrored where `flipped`."""
    images = []
    for data, mirrored in zip(encoded, flipped, strict=True):
        pixels = torch.ops.image.decode_jpeg(torch.from_numpy(data), 3)
        resized = F.interpolate(pixels[None], size=image_size, mode="bilinear", align_corners=False)[0]
        images.append(resized.flip(-1) if mirrored else resized)
    return torch.stack(images)


def repeated_colours(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Decode a JPEG of subsampling 4:2:0 with each sample of colour as a square of 2 x 2 pixels: (H, W, 3), RGB.

    EXIF is not looked at. libjpeg leaves colours as they are stored where it is asked for half of the size. The
    conversion is JFIF's.
    """
    with Image.open(io.BytesIO(data.tobytes())) as full, Image.open(io.BytesIO(data.tobytes())) as half:
        width, height = full.size
        full.draft("YCbCr", full.size)
        half.draft("YCbCr", (width // 2, height // 2))
        luma = np.asarray(full).astype(np.float32)[..., 0]
        stored = np.asarray(half).astype(np.float32)[..., 1:] - 128
    assert stored.shape[:2] == ((height + 1) // 2, (width + 1) // 2), "decoded at half of the size"
    blue, red = np.moveaxis(stored.repeat(2, axis=0).repeat(2, axis=1)[:height, :width], 2, 0)
    rgb = np.stack([luma + 1.402 * red, luma - 0.344136 * blue - 0.714136 * red, luma + 1.772 * blue], axis=2)
    return rgb.round().clip(0, 255).astype(np.uint8)
