"""Pictures of one large shape each, on a cluttered ground, whose class is its outline together with its texture.

Colour, size, stretch, rotation, place and light say nothing about the class. Small shapes of other kinds lie around,
a stroke may cross the picture, and half of the classes differ in texture alone from another.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fasttrain.errors import ConfigError, nearest
from fasttrain.recipes.image_sets.shapes import (
    OUTLINES,
    Floats,
    Outline,
    Texture,
    checks,
    crescent,
    dots,
    ground,
    noise,
    paint,
    stripes,
    stroke,
)

SPLITS = ("train", "val")
TEXTURES: dict[str, Texture | None] = {"plain": None, "striped": stripes, "checked": checks, "dotted": dots}
MAX_IMAGES = 10**6 - 1  # six digits in a file name


@dataclass(frozen=True)
class GeneratedConfig:
    """What to draw. Sizes are fractions of the image's side."""

    seed: int = 0  # of the pictures; independent of the training's
    image_size: int = 72  # side of the square images, pixels
    train_images: int = 3000
    val_images: int = 600
    shapes: tuple[str, ...] = ("disc", "square", "triangle", "star", "cross")  # of OUTLINES
    textures: tuple[str, ...] = ("plain", "striped", "checked", "dotted")  # of TEXTURES
    min_size: float = 0.5  # diameter of the circle around the shape, before its stretch
    max_size: float = 0.85
    max_turn: float = 30.0  # shapes stand upright within this many degrees
    max_distractors: int = 3
    jpeg_quality: int = 90  # Pillow's scale, 1 to 95
    noise: float = 8.0  # largest standard deviation of the pixel noise, in grey levels of 255

    def __post_init__(self) -> None:
        """Raise ConfigError for a value that cannot be drawn."""
        for key, known in (("shapes", list(OUTLINES)), ("textures", list(TEXTURES))):
            names = getattr(self, key)
            for name in names:
                if name not in known:
                    raise ConfigError(f"generated.{key}: nothing is called '{name}'; {nearest(name, known)}")
            if not names or len(set(names)) < len(names):
                raise ConfigError(f"generated.{key} must name one or more different ones, not {list(names)}")
        if self.image_size < 32:
            raise ConfigError(f"generated.image_size is {self.image_size}; shapes can't be told apart below 32 pixels")
        for images in (self.train_images, self.val_images):
            if not len(self.class_names) <= images <= MAX_IMAGES:
                raise ConfigError(
                    f"generated: {images} images were asked for; each split has {len(self.class_names)} (one of each "
                    f"class) to {MAX_IMAGES}"
                )
        if not 0.05 <= self.min_size <= self.max_size <= 1.0:
            raise ConfigError(f"generated: sizes {self.min_size} to {self.max_size}; 0.05 <= min <= max <= 1 is needed")

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, in the order of their folders."""
        return tuple(sorted(f"{texture}-{shape}" for shape in self.shapes for texture in self.textures))


def draw(config: GeneratedConfig, split: str, index: int) -> NDArray[np.uint8]:
    """Return picture `index` of a split, RGB (size, size, 3); its class is `index` modulo the number of classes.

    It depends on no other picture and not on how many there are.
    """
    rng = np.random.default_rng((config.seed, SPLITS.index(split), index))
    size = config.image_size
    picture = ground(rng, size)
    for _ in range(int(rng.integers(config.max_distractors + 1))):
        outline = (crescent, *OUTLINES.values())[int(rng.integers(1 + len(OUTLINES)))]
        _place(picture, rng, outline, None, (0.08, 0.2), 180.0, spread=1.0)
    texture, shape = config.class_names[index % len(config.class_names)].split("-")
    sizes = (config.min_size, config.max_size)
    _place(picture, rng, OUTLINES[shape], TEXTURES[texture], sizes, config.max_turn, spread=0.2)
    if rng.random() < 0.3:
        _place(picture, rng, stroke, None, (0.3, 1.0), 180.0, spread=0.8)
    picture += noise(rng, size) * (config.noise * rng.random())
    return picture.clip(0, 255).transpose(1, 2, 0).astype(np.uint8, order="C")


def _place(
    picture: Floats,
    rng: np.random.Generator,
    outline: Outline,
    texture: Texture | None,
    sizes: tuple[float, float],
    max_turn: float,
    spread: float,
) -> None:
    """Paint a shape, in place, with its centre within `spread` of the picture's."""
    size = picture.shape[1]
    random = rng.random(25).tolist()
    scale, stretching, turning, right, down, waves, phase = rng.random(7).tolist()
    radius = 0.5 * size * sizes[0] * (sizes[1] / sizes[0]) ** scale
    stretch = math.exp(0.3 * stretching - 0.15)
    turn = math.radians(max_turn) * (2 * turning - 1)
    x, y = ((0.5 + spread * (place - 0.5)) * size for place in (right, down))
    reach = 1.2 * radius + 4
    across, down_to = (slice(max(0, int(at - reach)), min(size, int(at + reach) + 1)) for at in (x, y))
    axis = np.arange(size, dtype=np.float32) + 0.5
    dx, dy = axis[across] - x, axis[down_to, None] - y
    cos, sin = math.cos(turn) / radius, math.sin(turn) / radius
    u = dx * (cos * stretch) + dy * (sin * stretch)
    v = dy * (cos / stretch) - dx * (sin / stretch)
    weight = None
    if texture is not None:
        weight = texture(7 + 4 * waves, 2 * math.pi * phase, u, v)
        random[21] = 1.0  # the second colour is clear, since it tells the class
    paint(picture[:, down_to, across], outline(u, v) * radius, u, v, radius, random, weight)
