"""Where an image is cropped: at random in training, as a function of numbers given, in the middle in evaluation."""

import math

import numpy as np
from numpy.typing import NDArray

ATTEMPTS = 10  # torchvision's; MLPerf's reference tries 100 times and then takes the whole image
NUMBERS = 2 * ATTEMPTS + 2

Integers = NDArray[np.int64]


def random_windows(
    numbers: NDArray[np.float64],
    heights: Integers,
    widths: Integers,
    area: tuple[float, float],
    aspect: tuple[float, float],
) -> Integers:
    """Return a window for each image, (images, 4): top, left, height, width in pixels.

    Shares of the area are uniform, aspect ratios log-uniform, and the first of ten that fits into the image is placed
    anywhere in it; where none fits, the largest in the middle whose aspect ratio is allowed: torchvision's
    RandomResizedCrop.

    Args:
        numbers: (images, NUMBERS), uniform in [0, 1).
        heights: of the images, (images,).
        widths: likewise.
        area: least and largest share of the image's area.
        aspect: least and largest width over height.
    """
    tries = numbers[:, : 2 * ATTEMPTS].reshape(-1, ATTEMPTS, 2)
    wanted = (area[0] + (area[1] - area[0]) * tries[..., 0]) * (heights * widths)[:, None]
    low, high = math.log(aspect[0]), math.log(aspect[1])
    ratio = np.exp(low + (high - low) * tries[..., 1])
    width, height = np.rint(np.sqrt(wanted * ratio)), np.rint(np.sqrt(wanted / ratio))
    fits = (width > 0) & (width <= widths[:, None]) & (height > 0) & (height <= heights[:, None])
    first = fits.argmax(axis=1)[:, None]
    size = np.concatenate([np.take_along_axis(each, first, 1) for each in (height, width)], axis=1).astype(np.int64)
    room = np.stack([heights, widths], axis=1)
    place = np.floor(numbers[:, 2 * ATTEMPTS :] * (room - size + 1)).astype(np.int64)
    windows = np.concatenate([place, size], axis=1)
    return np.where(fits.any(axis=1)[:, None], windows, _middle(heights, widths, aspect))


def resized_size(height: int, width: int, shorter: int) -> tuple[int, int]:
    """Return height and width of an image resized to a shorter side, its aspect ratio kept: torchvision's Resize."""
    if height <= width:
        return shorter, int(shorter * width / height)
    return int(shorter * height / width), shorter


def centre(height: int, width: int, side: int) -> tuple[int, int]:
    """Return top and left of a square in the middle: torchvision's CenterCrop."""
    return round((height - side) / 2.0), round((width - side) / 2.0)


def _middle(heights: Integers, widths: Integers, aspect: tuple[float, float]) -> Integers:
    ratio = widths / heights
    height = np.where(ratio < aspect[0], np.rint(widths / aspect[0]).astype(np.int64), heights)
    width = np.where(ratio > aspect[1], np.rint(heights * aspect[1]).astype(np.int64), widths)
    return np.stack([(heights - height) // 2, (widths - width) // 2, height, width], axis=1)
