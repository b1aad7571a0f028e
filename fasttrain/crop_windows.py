"""Windows of an image, drawn or fixed on the host as torchvision would, for many images at once.

Windows are int32 pairs (top, left) and (height, width) in pixels of the decoded image. Every loader of a set takes them
from here, with numbers from `sample_random`, so that all show the same.
"""

import math

import numpy as np
from numpy.typing import NDArray

ATTEMPTS = 10  # as torchvision's RandomResizedCrop
DRAWS = 2 * ATTEMPTS + 2  # numbers that `random_windows` takes for an image

Windows = tuple[NDArray[np.int32], NDArray[np.int32]]


def random_windows(
    sizes: NDArray[np.int32], numbers: NDArray[np.float64], scale: tuple[float, float], ratio: tuple[float, float]
) -> Windows:
    """Return windows distributed as those of torchvision's RandomResizedCrop.

    An area and an aspect ratio are drawn, up to ten times until the window fits into the image; if none does, it is
    the largest one in the middle whose ratio is allowed.

    Args:
        sizes: (n, 2), width and height of the images.
        numbers: (n, DRAWS), uniform in [0, 1).
        scale: bounds of the window's part of the image's area.
        ratio: bounds of width / height, whose logarithm is uniform.
    """
    width, height = sizes.T.astype(np.float64)
    part, where, place = numbers[:, :ATTEMPTS], numbers[:, ATTEMPTS : 2 * ATTEMPTS], numbers[:, 2 * ATTEMPTS :]
    area = (width * height)[:, None] * (scale[0] + (scale[1] - scale[0]) * part)
    aspect = np.exp(math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * where)
    across, down = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    fits = (across > 0) & (across <= width[:, None]) & (down > 0) & (down <= height[:, None])
    rows, first = np.arange(len(sizes)), fits.argmax(axis=1)
    found = np.stack((down[rows, first], across[rows, first]), axis=1)
    room = np.stack((height, width), axis=1)
    start = np.floor(place * (room - found + 1))
    without = ~fits.any(axis=1)
    found[without] = _middle(width[without], height[without], ratio)
    start[without] = (room[without] - found[without]) // 2
    return start.astype(np.int32), found.astype(np.int32)


def _middle(width: NDArray[np.float64], height: NDArray[np.float64], ratio: tuple[float, float]) -> NDArray[np.float64]:
    down = np.minimum(height, np.rint(width / ratio[0]))
    across = np.minimum(width, np.rint(height * ratio[1]))
    return np.stack((down, across), axis=1)


def resized_sizes(sizes: NDArray[np.int32], shorter: int) -> NDArray[np.int32]:
    """Return (n, 2), height and width when the shorter side becomes `shorter`: torchvision's Resize truncates."""
    short, long = sizes.min(axis=1), sizes.max(axis=1)
    other = (shorter * long.astype(np.int64) / short).astype(np.int32)
    wide = sizes[:, 0] >= sizes[:, 1]
    return np.stack((np.where(wide, shorter, other), np.where(wide, other, shorter)), axis=1).astype(np.int32)


def centre_starts(sizes: NDArray[np.int32], side: int) -> NDArray[np.int32]:
    """Return (n, 2), top and left of a square in the middle: torchvision's CenterCrop rounds halves to even.

    Args:
        sizes: (n, 2), height and width.
        side: of the square.
    """
    return np.rint((sizes - side) / 2.0).astype(np.int32)
