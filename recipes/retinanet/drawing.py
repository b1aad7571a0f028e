"""Pictures of shapes on cluttered grounds, each with the boxes of its objects, drawn from a random stream of its own.

A class is told by its outline alone: colour, texture, size, stretch, rotation and light are drawn from the same
distributions for all of them. Objects hide one another, strokes cross them, and crescents, strokes and specks lie
around that are no object.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasttrain.errors import ConfigError, nearest
from fasttrain.recipes.image_sets.shapes import (
    OUTLINES,
    Floats,
    Outline,
    checks,
    crescent,
    disc,
    ground,
    noise,
    paint,
    slope,
    stripes,
    stroke,
    unit_area,
)

MAX_IMAGES = 10**6 - 1  # six digits in a file name
SPLITS = ("train", "val")


@dataclass(frozen=True)
class GeneratedConfig:
    """What to draw. Sizes are fractions of the image's side."""

    seed: int = 0  # of the pictures; independent of the training's
    image_size: int = 96  # side of the square images, pixels
    train_images: int = 4000  # pictures in the training split
    val_images: int = 400  # and held out
    classes: tuple[str, ...] = ("disc", "square", "triangle", "ring", "star", "cross")  # of OUTLINES
    min_objects: int = 1  # objects per picture, drawn evenly; one that finds no place is left out
    max_objects: int = 4
    min_size: float = 0.28  # diameter of the circle around the shape, before its stretch
    max_size: float = 0.6
    max_hidden: float = 0.5  # the largest part of an object that may be covered or lie outside the image
    max_turn: float = 30.0  # objects stand upright within this many degrees; distractors lie any way
    max_distractors: int = 3  # crescents, strokes and specks per picture; one more stroke may lie on top
    jpeg_quality: int = 90  # Pillow's scale, 1 to 95
    noise: float = 6.0  # largest standard deviation of the pixel noise, in grey levels of 255

    def __post_init__(self) -> None:
        """Raise ConfigError for a value that cannot be drawn."""
        for name in self.classes:
            if name not in OUTLINES:
                raise ConfigError(f"generated.classes: no shape is called '{name}'; {nearest(name, OUTLINES)}")
        if not self.classes or len(set(self.classes)) < len(self.classes):
            raise ConfigError(f"generated.classes must name one or more different shapes, not {list(self.classes)}")
        if self.image_size < 32:
            raise ConfigError(f"generated.image_size is {self.image_size}; shapes can't be told apart below 32 pixels")
        for images in (self.train_images, self.val_images):
            if not 1 <= images <= MAX_IMAGES:
                raise ConfigError(f"generated: {images} images were asked for; each split has 1 to {MAX_IMAGES}")
        if not 1 <= self.min_objects <= self.max_objects <= 100:
            raise ConfigError(f"generated: {self.min_objects} to {self.max_objects} objects; 1 <= min <= max <= 100")
        if not 0.05 <= self.min_size <= self.max_size <= 1.0:
            raise ConfigError(f"generated: sizes {self.min_size} to {self.max_size}; 0.05 <= min <= max <= 1 is needed")
        if not 0 <= self.max_turn <= 180:
            raise ConfigError(f"generated.max_turn is {self.max_turn}; an angle from 0 to 180 degrees is needed")
        if not 0 <= self.max_hidden < 1:
            raise ConfigError(f"generated.max_hidden is {self.max_hidden}; a fraction from 0 to less than 1 is needed")


# What lies around that is no object, with the range of its size as a fraction of the image's side.
CRESCENT, STROKE, SPECK = (crescent, 0.15, 0.4), (stroke, 0.3, 1.2), (disc, 0.02, 0.05)
DISTRACTORS: tuple[tuple[Outline, float, float], ...] = (CRESCENT, STROKE, SPECK)


def _texture(kind: float, waves: float, phase: float, u: Floats, v: Floats) -> Floats | None:
    """Weight of the second colour over a shape: two of three shapes have one colour only."""
    for below, texture in ((0.2, slope), (0.3, stripes), (0.4, checks)):
        if kind < below:
            return texture(5 + 6 * waves, 2 * math.pi * phase, u, v)
    return None


class _Canvas:
    """A picture being drawn (3, size, size) in 0..255, and for every pixel the object that is seen there (-1: none)."""

    def __init__(self, rng: np.random.Generator, config: GeneratedConfig) -> None:
        self.rng, self.size = rng, config.image_size
        size, self.must_show, self.max_turn = config.image_size, 1 - config.max_hidden, math.radians(config.max_turn)
        self.picture = ground(rng, size)
        self.owner = np.full((size, size), -1, dtype=np.int64)
        self.seen: list[int] = []  # pixels of each object that are still seen
        self.needed: list[float] = []  # and how many must stay so
        self.axis = np.arange(size, dtype=np.float32) + 0.5

    def place(self, outline: Outline, min_size: float, max_size: float, is_object: bool = False) -> bool:
        """Draw a shape where each object, itself included, is seen enough; False if six tries found no such place."""
        size = self.size
        for _ in range(6):
            random = self.rng.random(5).tolist()
            radius = 0.5 * size * min_size * (max_size / min_size) ** random[0]
            stretch = math.exp(0.34 * random[1] - 0.17)
            turn = (self.max_turn if is_object else math.pi) * (2 * random[2] - 1)
            x, y = (0.12 + 0.76 * random[3]) * size, (0.12 + 0.76 * random[4]) * size
            reach = 1.2 * radius + 4
            across = slice(max(0, int(x - reach)), min(size, int(x + reach) + 1))
            down = slice(max(0, int(y - reach)), min(size, int(y + reach) + 1))
            dx, dy = self.axis[across] - x, self.axis[down, None] - y
            cos, sin = math.cos(turn) / radius, math.sin(turn) / radius
            u = dx * (cos * stretch) + dy * (sin * stretch)
            v = dy * (cos / stretch) - dx * (sin / stretch)
            distance = outline(u, v)
            distance *= radius
            needed = self.must_show * unit_area(outline) * radius**2
            if self._claim(distance < 0, (down, across), needed, is_object):
                self._paint(self.picture[:, down, across], distance, u, v, radius)
                return True
        return False

    def _claim(self, mask: NDArray[np.bool_], where: tuple[slice, slice], needed: float, is_object: bool) -> bool:
        """Give the pixels under the mask to the new shape, unless an object would then be seen too little."""
        pixels = int(np.count_nonzero(mask))
        if is_object and pixels < needed:
            return False
        owner = self.owner[where]
        covered = np.bincount(owner[mask] + 1, minlength=len(self.seen) + 1)[1:].tolist()
        left = [seen - lost for seen, lost in zip(self.seen, covered, strict=True)]
        if any(have < need for have, need in zip(left, self.needed, strict=True)):
            return False
        self.seen = left
        if is_object:
            self.seen.append(pixels)
            self.needed.append(needed)
        owner[mask] = len(self.seen) - 1 if is_object else -1
        return True

    def _paint(self, patch: Floats, distance: Floats, u: Floats, v: Floats, radius: float) -> None:
        random = self.rng.random(25).tolist()
        kind, waves, phase = random[18:21]
        paint(patch, distance, u, v, radius, random, _texture(kind, waves, phase, u, v))


@dataclass(frozen=True)
class Drawing:
    """One picture and what is seen on it."""

    picture: NDArray[np.uint8]  # RGB (size, size, 3)
    owner: NDArray[np.int64]  # (size, size): index of the object that is seen at a pixel, -1 for none
    labels: list[int]  # class index of each object


def draw(config: GeneratedConfig, split: str, index: int) -> Drawing:
    """Return picture `index` of a split; it depends on no other picture and not on how many there are."""
    rng = np.random.default_rng((config.seed, SPLITS.index(split), index))
    canvas = _Canvas(rng, config)
    objects = int(rng.integers(config.min_objects, config.max_objects + 1))
    clutter = int(rng.integers(config.max_distractors + 1))
    labels: list[int] = []
    for kind in rng.integers(len(DISTRACTORS), size=clutter).tolist():
        canvas.place(*DISTRACTORS[kind])
    for label in rng.integers(len(config.classes), size=objects).tolist():
        if canvas.place(OUTLINES[config.classes[label]], config.min_size, config.max_size, is_object=True):
            labels.append(label)
    if rng.random() < 0.35:
        canvas.place(*STROKE)  # across what is there
    picture = canvas.picture
    picture += noise(rng, config.image_size) * (config.noise * rng.random())
    np.minimum(np.maximum(picture, 0, out=picture), 255, out=picture)
    return Drawing(picture.transpose(1, 2, 0).astype(np.uint8, order="C"), canvas.owner, labels)


def visible_objects(drawing: Drawing) -> list[dict[str, Any]]:
    """Return COCO's bbox (x, y, width, height), area and the class index of each object, from its visible pixels."""
    found = []
    for number, label in enumerate(drawing.labels):
        rows, columns = np.nonzero(drawing.owner == number)
        left, top = int(columns.min()), int(rows[0])
        box = [left, top, int(columns.max()) + 1 - left, int(rows[-1]) + 1 - top]
        found.append({"bbox": box, "area": len(rows), "label": label})
    return found
