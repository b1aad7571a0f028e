"""Encoded images with a class each, whatever holds them: a folder for each class, tar shards or TFRecord files."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fasttrain.callbacks.dali_loader.encoded import EncodedFiles, EncodedSamples
from fasttrain.callbacks.dali_loader.image_size import ImageSizes
from fasttrain.errors import DataError, nearest

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """A classification set before anything is decoded."""

    encoded: EncodedSamples
    labels: NDArray[np.int64]  # (images,): class index
    class_names: tuple[str, ...]
    image_sizes: Callable[[NDArray[np.int64]], NDArray[np.int32]]
    """Gives width and height, (n, 2), of the images at n indices."""

    def __len__(self) -> int:
        return len(self.encoded)

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)

    def numbered_as(self, class_names: tuple[str, ...], place: Path) -> "LabelledImages":
        """Return the same images with labels that are indices into other class names, a training set's for instance.

        Args:
            class_names: all of this set's, and others maybe.
            place: where these images lie, for the error.

        Raises:
            DataError: one of this set's classes is not among them.
        """
        numbers = {name: number for number, name in enumerate(class_names)}
        for name in self.class_names:
            if name not in numbers:
                raise DataError(
                    f"'{place}' has a class '{name}' that the training set lacks; {nearest(name, class_names)}"
                )
        table = np.array([numbers[name] for name in self.class_names], dtype=np.int64)
        return replace(self, labels=table[self.labels], class_names=class_names)


class _ImageFiles(EncodedFiles):
    def head(self, index: int, count: int) -> bytes:
        try:
            with open(self.paths[index], "rb") as file:
                return file.read(min(count, 2**31))
        except OSError as error:
            raise DataError(f"'{self.paths[index]}' can't be read: {error.strerror or error}.") from error


def class_folder(folder: Path) -> LabelledImages:
    """Return the images of a folder with a subfolder for each class, at any depth in it.

    Classes are numbered by name, images by class and path: the order of torchvision's ImageFolder.

    Raises:
        DataError: there is no such folder, or no subfolders or images in it.
    """
    classes = images_by_class(folder)
    paths = [str(path) for found in classes.values() for path in found]
    labels = np.repeat(np.arange(len(classes)), [len(found) for found in classes.values()])
    files = _ImageFiles(paths)
    unknown = np.zeros((len(paths), 2), dtype=np.int32)
    sizes = ImageSizes(files.head, unknown, files.name)
    return LabelledImages(files, labels, tuple(classes), sizes)


def images_by_class(folder: Path) -> dict[str, list[Path]]:
    """Return the images in each subfolder, at any depth, in the order of torchvision's ImageFolder.

    Raises:
        DataError: as for `class_folder`.
    """
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir())
    except OSError as error:
        raise DataError(f"the folder '{folder}' can't be read: {error.strerror or error}.") from error
    if not names:
        raise DataError(f"'{folder}' has no subfolders; a folder for each class is needed, with its images in it.")
    classes = {name: _images_below(folder / name) for name in names}
    for name, found in classes.items():
        if not found:
            kinds = ", ".join(IMAGE_SUFFIXES)
            raise DataError(f"the class folder '{folder / name}' has no images ({kinds}); fill or remove it.")
    return classes


def _images_below(folder: Path) -> list[Path]:
    found = []
    for place, _, names in sorted(os.walk(folder, followlinks=True)):
        found += [Path(place, name) for name in sorted(names) if name.lower().endswith(IMAGE_SUFFIXES)]
    return found
