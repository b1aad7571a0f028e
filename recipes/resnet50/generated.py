"""The generated set that trains when no data is named: a folder for each class, drawn once into a cache folder.

The pictures depend only on the config (every image has its own random stream), not on the number of processes that
drew them.
"""

import os
from dataclasses import asdict
from functools import partial
from pathlib import Path

from PIL import Image

from fasttrain.recipes.image_sets.drawn import Chunk, OnProgress, config_hash, draw_chunks, draw_once
from fasttrain.recipes.resnet50.drawing import SPLITS, GeneratedConfig, draw

DRAWING_VERSION = 1  # raise it whenever the same config would give other pictures


def generate(
    folder: Path, config: GeneratedConfig, on_progress: OnProgress | None = None, processes: int = 2
) -> tuple[Path, Path]:
    """Return the folders of the training and the evaluation split, drawn into `folder` unless they lie there whole.

    `on_progress(done, total)` is called as images are written. Raises DataError if the folder cannot be written.
    """
    values = asdict(config)
    name = config_hash(DRAWING_VERSION, values)
    place = folder / f"textures-{config.image_size}px-{name}"
    draw_once(
        place,
        {"hash": name, "config": values},
        partial(_is_complete, config),
        lambda unfinished: _write(unfinished, config, on_progress, processes),
    )
    return place / "train", place / "val"


def _counts(config: GeneratedConfig) -> dict[str, int]:
    return dict(zip(SPLITS, (config.train_images, config.val_images), strict=True))


def _is_complete(config: GeneratedConfig, place: Path) -> bool:
    return all(
        sum(1 for name in config.class_names for _ in os.scandir(place / split / name)) == count
        for split, count in _counts(config).items()
    )


def _write(place: Path, config: GeneratedConfig, on_progress: OnProgress | None, processes: int) -> None:
    counts = _counts(config)
    for split in counts:
        for name in config.class_names:
            (place / split / name).mkdir(parents=True)
    draw_chunks(counts, partial(_write_chunk, place, config), on_progress, processes)


def _write_chunk(place: Path, config: GeneratedConfig, chunk: Chunk) -> list[None]:
    split, start, stop = chunk
    for index in range(start, stop):
        name = config.class_names[index % len(config.class_names)]
        file = place / split / name / f"{index:06d}.jpg"
        Image.fromarray(draw(config, split, index)).save(file, quality=config.jpeg_quality)
    return [None] * (stop - start)
