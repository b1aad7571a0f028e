"""JPEGs that are as hard to decode as photographs, drawn once, and detection data of them."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image

from fasttrain.environment import cache_folder, usable_cores

VERSION = 1
COUNT = 256
ROUGHNESS = 0.6
"""Exponent of amplitude over wavelength: 1024 x 768 at quality 90 becomes 130 to 200 kB, as photographs do."""


def photos(height: int, width: int, quality: int = 90, count: int = COUNT) -> list[Path]:
    """Return paths of `count` JPEGs of a size, drawn into the cache folder if they are not there yet."""
    folder = cache_folder() / f"bench-photos-{VERSION}-{width}x{height}-q{quality}-{count}"
    paths = [folder / f"{index:04}.jpg" for index in range(count)]
    if not folder.is_dir():
        unfinished = folder.with_name(f".{folder.name}-{os.getpid()}")
        unfinished.mkdir(parents=True)
        draw = partial(_save, unfinished, height, width, quality)
        with ThreadPoolExecutor(usable_cores()) as pool:
            list(pool.map(draw, range(count)))
        if not folder.is_dir():  # another process may have been first
            unfinished.rename(folder)
        shutil.rmtree(unfinished, ignore_errors=True)
    return paths


def detection_files(paths: list[Path], height: int, width: int, images: int) -> Path:
    """Write COCO annotations of `images` images, the same files over and over, seven boxes each; return the path."""
    file = paths[0].parent / f"detection-{images}.json"
    if not file.exists():
        records = [
            {"id": i, "file_name": paths[i % len(paths)].name, "width": width, "height": height} for i in range(images)
        ]
        boxes = [
            {"image_id": i, "category_id": k, "bbox": [40 + 90 * k, 30 + 40 * k, 120 + i % 50, 90 + i % 40]}
            for i in range(images)
            for k in range(7)
        ]
        categories = [{"id": k, "name": f"class {k}"} for k in range(7)]
        text = json.dumps({"images": records, "annotations": boxes, "categories": categories})
        unfinished = file.with_name(f".{file.name}-{os.getpid()}")
        unfinished.write_text(text)
        unfinished.rename(file)
    return file


def _save(folder: Path, height: int, width: int, quality: int, seed: int) -> None:
    """Save a sum of noise of all wavelengths: mostly of brightness, a little of colour."""
    random = torch.Generator().manual_seed(seed)
    picture = torch.zeros(1, 3, height, width)
    octave = 2
    while octave < height // 2:
        shape = (1, 3, height // octave + 1, width // octave + 1)
        noise = torch.randn(shape, generator=random)
        layer = 0.3 * noise + 1.5 * noise.mean(dim=1, keepdim=True)
        picture += octave**ROUGHNESS * F.interpolate(layer, (height, width), mode="bicubic", align_corners=False)
        octave *= 2
    levels = (118 + 55 * picture / picture.std()).clamp(0, 255).to(torch.uint8)[0].permute(1, 2, 0)
    Image.fromarray(levels.numpy()).save(folder / f"{seed:04}.jpg", quality=quality)
