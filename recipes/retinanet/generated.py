"""The generated set that trains when no data is named: drawn once into a cache folder, as JPEGs with COCO boxes.

The pictures depend only on the config (every image has its own random stream), not on the number of processes that
drew them.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from fasttrain.errors import DataError
from fasttrain.processes import in_processes
from fasttrain.recipes.retinanet.drawing import SPLITS, GeneratedConfig, draw, visible_objects

Progress = Callable[[int, int], None]

DRAWING_VERSION = 1  # raise it whenever the same config would give other pictures
STAMP = "generated.json"
CHUNK = 50  # images a process draws before it reports


@dataclass(frozen=True)
class GeneratedSet:
    """Where the drawn set lies: a folder of JPEGs and a COCO annotation file for each split."""

    train_images: Path
    train_annotations: Path
    val_images: Path
    val_annotations: Path


def generate(
    folder: Path, config: GeneratedConfig, on_progress: Progress | None = None, processes: int = 2
) -> GeneratedSet:
    """Draw the set into a folder of its own under `folder`, or return at once if it lies there whole.

    `on_progress(done, total)` is called as images are written. The set is drawn beside its place and moved there when
    whole, so that an interrupted one is never used. Raises DataError if the folder cannot be written.
    """
    place = folder / f"shapes-{config.image_size}px-{config_hash(config)}"
    if _is_whole(place, config):
        return _paths(place)
    unfinished = folder / f".{place.name}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        unfinished.mkdir(parents=True)
        _write(unfinished, config, on_progress or (lambda done, total: None), processes)
        _move(unfinished, place, config)
    except OSError as error:
        raise DataError(
            f"The generated images could not be written to {folder} ({error.strerror or error}); "
            "name a folder with room for them in data.cache_folder or the environment variable FASTTRAIN_CACHE."
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return _paths(place)


def config_hash(config: GeneratedConfig) -> str:
    """Twelve hexadecimal digits that change with any value that changes the pictures."""
    described = json.dumps([DRAWING_VERSION, asdict(config)], sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()[:12]


def _paths(place: Path) -> GeneratedSet:
    return GeneratedSet(place / "train", place / "train.json", place / "val", place / "val.json")


def _counts(config: GeneratedConfig) -> dict[str, int]:
    return dict(zip(SPLITS, (config.train_images, config.val_images), strict=True))


def _is_whole(place: Path, config: GeneratedConfig) -> bool:
    try:
        stamp = json.loads((place / STAMP).read_text())
        return stamp["hash"] == config_hash(config) and all(
            (place / f"{split}.json").is_file() and sum(1 for _ in os.scandir(place / split)) == count
            for split, count in _counts(config).items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _move(unfinished: Path, place: Path, config: GeneratedConfig) -> None:
    """Rename a whole set into its place; another process that was there first with the same set is as good."""
    if place.exists() and not _is_whole(place, config):
        place.rename(unfinished / "damaged")
    try:
        unfinished.rename(place)
    except OSError:
        if not _is_whole(place, config):
            raise
    shutil.rmtree(place / "damaged", ignore_errors=True)


def _write(place: Path, config: GeneratedConfig, on_progress: Progress, processes: int) -> None:
    counts = _counts(config)
    chunks = [
        (split, start, min(start + CHUNK, count)) for split, count in counts.items() for start in range(0, count, CHUNK)
    ]
    for split in counts:
        (place / split).mkdir()
    found: dict[str, list[list[dict[str, Any]]]] = {split: [] for split in counts}
    done = 0
    with closing(in_processes(partial(_write_chunk, place, config), chunks, processes)) as results:
        for (split, _, _), objects in zip(chunks, results, strict=True):
            found[split] += objects
            done += len(objects)
            on_progress(done, sum(counts.values()))
    for split, images in found.items():
        (place / f"{split}.json").write_text(json.dumps(_coco(config, images)))
    (place / STAMP).write_text(json.dumps({"hash": config_hash(config), "config": asdict(config)}, indent=1))


def _file_name(index: int) -> str:
    return f"{index:06d}.jpg"


def _write_chunk(place: Path, config: GeneratedConfig, chunk: tuple[str, int, int]) -> list[list[dict[str, Any]]]:
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
