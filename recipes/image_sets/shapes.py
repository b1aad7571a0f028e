"""Shapes by signed distance, textures, colours and cloudy grounds: what generated pictures are made of."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Floats = NDArray[np.floating[Any]]  # float32; NumPy's stubs take it times a Python float for float64

# ---- outlines: signed distance, negative inside, in units of the radius of the circle around the shape -----------


def disc(u: Floats, v: Floats) -> Floats:
    """A full circle."""
    return np.hypot(u, v) - 0.92


def _square(u: Floats, v: Floats) -> Floats:
    return np.maximum(np.abs(u), np.abs(v)) - 0.76


def _triangle(u: Floats, v: Floats) -> Floats:
    return np.maximum(np.abs(u) * 0.866 - v * 0.5, v) - 0.5


def _ring(u: Floats, v: Floats) -> Floats:
    return np.abs(np.hypot(u, v) - 0.74) - 0.22


def _star(u: Floats, v: Floats) -> Floats:
    """Five points: in half a sector, folded together, the edge runs from a tip at radius 1 to a notch at 0.45."""
    half = math.pi / 5
    angle = np.abs((np.arctan2(u, -v) + half) % (2 * half) - half)
    radius = np.hypot(u, v)
    notch_x, notch_y = 0.45 * math.cos(half), 0.45 * math.sin(half)
    length = math.hypot(1 - notch_x, notch_y)
    return (radius * np.cos(angle) - 1) * (notch_y / length) + radius * np.sin(angle) * ((1 - notch_x) / length)


def _cross(u: Floats, v: Floats) -> Floats:
    a, b = np.abs(u), np.abs(v)
    distance: Floats = np.maximum(np.maximum(a, b) - 0.94, np.minimum(a, b) - 0.3)
    return distance


def crescent(u: Floats, v: Floats) -> Floats:
    """A disc with a bite out of it."""
    bite: Floats = 0.85 - np.hypot(u - 0.5, v)
    return np.maximum(np.hypot(u, v) - 0.95, bite)


def stroke(u: Floats, v: Floats) -> Floats:
    """A line with round ends."""
    return np.hypot(np.maximum(np.abs(u) - 0.95, 0), v) - 0.055


Outline = Callable[[Floats, Floats], Floats]
OUTLINES: dict[str, Outline] = {
    "disc": disc, "square": _square, "triangle": _triangle, "ring": _ring, "star": _star, "cross": _cross,
}  # fmt: skip


# ---- drawing: at this size a picture costs NumPy calls, not pixels, so random numbers are drawn by the handful ---


@cache
def unit_area(outline: Outline) -> float:
    """Area of a shape of radius 1."""
    axis = np.linspace(-1.3, 1.3, 261, dtype=np.float32)
    return float(np.count_nonzero(outline(axis[None, :], axis[:, None]) < 0)) * 0.01**2


@cache
def _noise_sheet() -> Floats:
    """Standard normal noise (512, 512) of which every picture takes a piece."""
    return np.random.default_rng(0).standard_normal((512, 512), dtype=np.float32)


def noise(rng: np.random.Generator, size: int) -> Floats:
    """Standard normal noise (size, size)."""
    sheet = _noise_sheet()
    if size > 256:
        return rng.standard_normal((size, size), dtype=np.float32)
    top, left = rng.integers(512 - size, size=2).tolist()
    return sheet[top : top + size, left : left + size]


def unit(values: Floats) -> Floats:
    """The values, in place, limited to 0..1."""
    np.maximum(values, 0, out=values)
    return np.minimum(values, 1, out=values)


def colour_apart(drawn: list[float], apart_from: list[float]) -> list[float]:
    """Red, green, blue in 0..255: of the vivid colours made from nine numbers, the one farthest from another colour."""
    best, farthest = apart_from, -1.0
    for at in (0, 3, 6):
        three = drawn[at : at + 3]
        low, high = min(three), max(three)
        stretch = (high - 0.4 * low) / (high - low + 1e-3)  # moves the colour off the grey axis
        colour = [min(255.0, 30 + 212 * (low + (value - low) * stretch)) for value in three]
        distance = sum(abs(one - other) for one, other in zip(colour, apart_from, strict=True))
        if distance > farthest:
            best, farthest = colour, distance
    return best


def planes(colour: list[float]) -> Floats:
    """Return a colour as (3, 1, 1)."""
    return np.array(colour, dtype=np.float32).reshape(3, 1, 1)


def ground(rng: np.random.Generator, size: int) -> Floats:
    """A cloudy ground (3, size, size) in 0..255: enlarged colour noise with finer grey noise on it."""
    coarse, fine = rng.integers((2, 6), (6, 15)).tolist()
    base, strength, graininess = 50 + 140 * rng.random(3), 30 + 50 * rng.random(), 5 + 35 * rng.random()
    clouds = base + strength * (rng.random((coarse, coarse, 3)) + rng.random((coarse, coarse, 1)) - 1)
    grain = 128 + graininess * (2 * rng.random((fine, fine)) - 1)
    layers = [
        np.asarray(Image.fromarray(cells.clip(0, 255).astype(np.uint8)).resize((size, size), Image.Resampling.BICUBIC))
        for cells in (clouds, grain)
    ]
    return layers[0].transpose(2, 0, 1).astype(np.float32, order="C") + (layers[1].astype(np.float32) - 128)


def slope(rate: float, phase: float, u: Floats, v: Floats) -> Floats:
    """From one side to the other; rate and phase don't matter."""
    return unit(0.6 * u + 0.5)


def stripes(rate: float, phase: float, u: Floats, v: Floats) -> Floats:
    """Stripes of the width pi / rate."""
    return unit(2 * np.sin(rate * u + phase) + 0.5)


def checks(rate: float, phase: float, u: Floats, v: Floats) -> Floats:
    """A chessboard."""
    return unit(3 * np.sin(rate * u + phase) * np.sin(rate * v) + 0.5)


def dots(rate: float, phase: float, u: Floats, v: Floats) -> Floats:
    """Round spots at the crossings of a grid."""
    return unit(3 * np.cos(rate * u + phase) * np.cos(rate * v) - 0.5)


Texture = Callable[[float, float, Floats, Floats], Floats]
"""Weight of the second colour over a shape, in 0..1."""


def paint(
    patch: Floats, distance: Floats, u: Floats, v: Floats, radius: float, random: list[float], weight: Floats | None
) -> None:
    """Paint a shape, with its shadow, over a part of a picture (3, height, width), in place.

    Args:
        patch: the part, 0..255.
        distance: signed distance to the shape's edge, in pixels, (height, width).
        u: place in the shape's own coordinates, likewise.
        v: the other one.
        radius: of the circle around the shape, in pixels.
        random: 25 numbers in 0..1 that colours, light, outline and shadow are taken from.
        weight: of the second colour, in 0..1, or None for one colour.
    """
    blend, light, outlined, darkness = random[21:]
    colour = colour_apart(random[:9], patch[:, patch.shape[1] // 2, patch.shape[2] // 2].tolist())
    coat = planes(colour)
    if weight is not None:
        coat = (planes(colour_apart(random[9:18], colour)) - coat) * (weight * (0.2 + 0.5 * blend)) + coat
    shade = u * (0.2 * math.cos(6.28 * light)) + v * (0.2 * math.sin(6.28 * light)) + 1
    if outlined < 0.4:
        shade *= 1 - 0.55 * unit(distance + (max(1.0, 0.09 * radius) + 0.5))
    drop = max(1, round(0.12 * radius))
    shadow = unit(distance[:-drop, :-drop] * (-0.5 / drop) + 0.6)
    patch[:, drop:, drop:] *= 1 - 0.55 * darkness * shadow
    patch += (coat * shade - patch) * unit(0.5 - distance)
