"""The generated set that trains when no data is named: drawn once into a cache folder, as JPEGs with COCO boxes.

The pictures depend only on the config (every image has its own random stream), not on the number of processes that
drew them.
"""

import json
import os
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from fasttrain.recipes.image_sets.drawn import Chunk, OnProgress, config_hash, draw_chunks, draw_once
from fasttrain.recipes.retinanet.drawing import SPLITS, GeneratedConfig, draw, visible_objects

DRAWING_VERSION = 1  # raise it whenever the same config would give other pictures


@dataclass(frozen=True)
class GeneratedSet:
    """Where the drawn set lies: a folder of JPEGs and a COCO annotation file for each split."""

    train_images: Path
    train_annotations: Path
    val_images: Path
    val_annotations: Path


def generate(
    folder: Path, config: GeneratedConfig, on_progress: OnProgress | None = None, processes: int = 2
) -> GeneratedSet:
    """Draw the set into a folder of its own under `folder`, or return at once if it lies there whole.

    `on_progress(done, total)` is called as images are written. Raises DataError if the folder cannot be written.
    """
    values = asdict(config)
    name = config_hash(DRAWING_VERSION, values)
    place = folder / f"shapes-{config.image_size}px-{name}"
    draw_once(
        place,
        {"hash": name, "config": values},
        partial(_is_complete, config),
        lambda unfinished: _write(unfinished, config, on_progress, processes),
    )
    return GeneratedSet(place / "train", place / "train.json", place / "val", place / "val.json")


def _counts(config: GeneratedConfig) -> dict[str, int]:
    return dict(zip(SPLITS, (config.train_images, config.val_images), strict=True))


def _is_complete(config: GeneratedConfig, place: Path) -> bool:
    return all(
        (place / f"{split}.json").is_file() and sum(1 for _ in os.scandir(place / split)) == count
        for split, count in _counts(config).items()
    )


def _write(place: Path, config: GeneratedConfig, on_progress: OnProgress | None, processes: int) -> None:
    counts = _counts(config)
    for split in counts:
        (place / split).mkdir()
    found = draw_chunks(counts, partial(_write_chunk, place, config), on_progress, processes)
    for split, images in found.items():
        (place / f"{split}.json").write_text(json.dumps(_coco(config, images)))


def _file_name(index: int) -> str:
    return f"{index:06d}.jpg"


def _write_chunk(place: Path, config: GeneratedConfig, chunk: Chunk) -> list[list[dict[str, Any]]]:
    split, start, stop = chunk
    found = []
    for index in range(start, stop):
        drawing = draw(config, split, index)
        Image.fromarray(drawing.picture).save(place / split / _file_name(index), quality=config.jpeg_quality)
        found.append(visible_objects(drawing))
    return found


def _coco(config: GeneratedConfig, images: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """COCO annotations; ids count from 1, as in COCO."""
    objects = [(image, found) for image, several in enumerate(images, 1) for found in several]
    return {
        "info": {"description": "fasttrain generated shapes", "version": str(DRAWING_VERSION)},
        "images": [
            {"id": image, "file_name": _file_name(image - 1), "width": config.image_size, "height": config.image_size}
            for image in range(1, len(images) + 1)
        ],
        "annotations": [
            {
                "id": number, "image_id": image, "category_id": found["label"] + 1,
                "bbox": found["bbox"], "area": found["area"], "iscrowd": 0,
            }
            for number, (image, found) in enumerate(objects, 1)
        ],
        "categories": [{"id": number, "name": name} for number, name in enumerate(config.classes, 1)],
    }  # fmt: skip
