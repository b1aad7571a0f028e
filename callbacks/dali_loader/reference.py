"""The obvious version: decode, resize and mirror with torchvision and torch, an image at a time."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
import torchvision  # noqa: F401  (its import registers torch.ops.image)
from numpy.typing import NDArray
from torch import Tensor

TOLERANCE = {"cpu": (1.0, 0.5), "gpu": (255.0, 3.0), "gpu, fancy_upsampling": (255.0, 2.0)}
"""Largest and mean difference in grey levels, by how DALI decodes; of floats, after denormalizing.

On a CPU both decode with libjpeg-turbo, and the resize rounds otherwise: DALI to the nearest level from floats, torch
from 16-bit fixed point. A GPU repeats colour samples, of which a JPEG has half as many each way, where libjpeg-turbo
interpolates: single pixels at edges of colour differ by any amount, so the mean tells. It was 2.5 on an H200 for
pictures that are noise in colour too, by the decoder unit and without it, and below 2 with `fancy_upsampling`.
"""


def reference(encoded: Sequence[NDArray[np.uint8]], image_size: tuple[int, int], flipped: Sequence[bool]) -> Tensor:
    """Return JPEGs as uint8 (B, 3, H, W), RGB, resized to one size and mirrored where `flipped`."""
    images = []
    for data, mirrored in zip(encoded, flipped, strict=True):
        pixels = torch.ops.image.decode_jpeg(torch.from_numpy(data), 3)
        resized = F.interpolate(pixels[None], size=image_size, mode="bilinear", align_corners=False)[0]
        images.append(resized.flip(-1) if mirrored else resized)
    return torch.stack(images)
