"""JPEGs that cost a decoder what photographs cost, for measuring loaders: made once, the same on every machine.

A photograph's spectrum falls with the frequency, and it has edges and a sensor's noise. So each picture is a sum of
random grids from coarse to fine, of falling strength, with flat and shaded shapes over it and noise of a grey level or
two on all.
"""

import os
import secrets
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from fasttrain.environment import usable_cores
from fasttrain.processes import in_processes

PICTURES_VERSION = 1  # raise it whenever the same index would give another picture
TEXTURE, NOISE = 16.0, 6.0  # grey levels; with these a file has about the size of a photograph
CHUNK = 16  # pictures a process makes at once


def photo_like_jpegs(folder: Path, count: int, size: tuple[int, int], quality: int = 90) -> list[Path]:
    """Return `count` JPEGs of one size below a folder, made by several processes unless they lie there from before.

    Args:
        folder: where those of all sizes are kept, each in a subfolder.
        count: of the pictures. More of them keep the first ones.
        size: width and height in pixels.
        quality: Pillow's scale. At 90 and 500 x 375 pixels a file has about 92 kB; ImageNet's 138 GB make it 108.
    """
    place = folder / f"photo-like-{PICTURES_VERSION}-{size[0]}x{size[1]}-q{quality}"
    place.mkdir(parents=True, exist_ok=True)
    paths = [place / f"{index:06d}.jpg" for index in range(count)]
    missing = [index for index, path in enumerate(paths) if not path.is_file()]
    chunks = [missing[at : at + CHUNK] for at in range(0, len(missing), CHUNK)]
    for _ in in_processes(partial(_write, place, size, quality), chunks, min(usable_cores(), len(chunks))):
        pass
    return paths


def photo_like_classes(
    folder: Path, images: int, classes: int, distinct: int, size: tuple[int, int], quality: int = 90
) -> Path:
    """Return a folder of class folders with so many images: `distinct` JPEGs over and over, as hard links.

    So a set as long as one likes is in the page cache; it is linked once.
    """
    paths = photo_like_jpegs(folder, distinct, size, quality)
    place = paths[0].parent.with_name(f"{paths[0].parent.name}-{images}-in-{classes}-of-{distinct}")
    if not place.is_dir():
        unfinished = place.with_name(f".{place.name}-{os.getpid()}-{secrets.token_hex(4)}")
        for number in range(classes):
            (unfinished / f"{number:04d}").mkdir(parents=True)
        for index in range(images):
            os.link(paths[index % distinct], unfinished / f"{index % classes:04d}" / f"{index:07d}.jpg")
        unfinished.rename(place)
    return place


def photo_like(index: int, size: tuple[int, int]) -> NDArray[np.uint8]:
    """Return picture `index`, (height, width, 3) RGB; a function of its arguments alone."""
    random = np.random.default_rng((PICTURES_VERSION, index))
    width, height = size
    picture, where = _clouds(random, size)
    shapes, shade = _shapes(random, size)
    picture = picture * shade + shapes
    picture += (TEXTURE * where + NOISE) * random.standard_normal((height, width, 1), dtype=np.float32)
    picture += NOISE * random.standard_normal((height, width, 3), dtype=np.float32)
    return picture.clip(0, 255, out=picture).astype(np.uint8)


def _clouds(random: np.random.Generator, size: tuple[int, int]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return a ground of all frequencies but the highest (height, width, 3), and where there is texture (..., 1).

    Each grid has twice the cells of the one before and three quarters of its strength, and is mostly grey.
    """
    planes = np.zeros((4, 2, 2), dtype=np.float32)  # the fourth is the texture's
    cells, strength = 4, 32.0
    while cells < max(size) / 2:
        across, down = (max(2, round(cells * side / max(size))) for side in size)
        planes = _enlarged(planes, (across, down))
        planes += strength * random.standard_normal((1, *planes.shape[1:]), dtype=np.float32)
        planes += 0.4 * strength * random.standard_normal(planes.shape, dtype=np.float32)
        cells, strength = 2 * cells, 0.74 * strength
    planes = _enlarged(planes, size)
    # Texture lies on some parts of a photograph and not on others.
    return 110 + planes[:3].transpose(1, 2, 0), np.clip(planes[3, :, :, None] / 50 + 0.3, 0, 2)


def _enlarged(planes: NDArray[np.float32], size: tuple[int, int]) -> NDArray[np.float32]:
    """Return planes (n, h, w) in another size, given as width and height, without steps between the cells."""
    return np.stack([np.asarray(Image.fromarray(plane).resize(size, Image.Resampling.BICUBIC)) for plane in planes])


def _shapes(random: np.random.Generator, size: tuple[int, int]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return what sharp-edged shapes add to a picture, and what they leave of it: (height, width, 3) and (..., 1)."""
    image, kept = Image.new("RGB", size), Image.new("L", size, 255)
    colours, left = ImageDraw.Draw(image), ImageDraw.Draw(kept)
    for _ in range(int(random.integers(8, 24))):
        x, y = random.random(2) * size
        corners = int(random.integers(3, 9))
        angles = np.sort(random.random(corners)) * 2 * np.pi
        reach = random.uniform(0.03, 0.3) * min(size) * random.uniform(0.5, 1.5, corners)
        outline = [(float(x + r * np.cos(a)), float(y + r * np.sin(a))) for r, a in zip(reach, angles, strict=True)]
        colours.polygon(outline, fill=tuple(random.integers(0, 120, 3).tolist()))
        left.polygon(outline, fill=int(random.integers(90, 220)))
    return np.asarray(image, dtype=np.float32), np.asarray(kept, dtype=np.float32)[..., None] / np.float32(255)


def _write(place: Path, size: tuple[int, int], quality: int, indices: list[int]) -> None:
    for index in indices:
        unfinished = place / f".{index:06d}-{os.getpid()}-{secrets.token_hex(4)}.jpg"
        Image.fromarray(photo_like(index, size)).save(unfinished, quality=quality)
        unfinished.replace(place / f"{index:06d}.jpg")
