"""A classification set in whatever holds it, told by what lies at its path."""

from collections.abc import Callable
from pathlib import Path

from fasttrain.callbacks.dali_loader.labelled import LabelledImages, class_folder
from fasttrain.callbacks.dali_loader.tar_shards import labelled_shards
from fasttrain.callbacks.dali_loader.tfrecord import tfrecord_images
from fasttrain.errors import DataError

TFRECORD_NAMES = ("*.tfrecord", "*.tfrecords", "*-?????-of-?????")


def labelled_images(
    path: Path, *, first_label: int = 0, on_progress: Callable[[int, int], None] | None = None
) -> LabelledImages:
    """Return the images at a path with their labels.

    Args:
        path: a folder with tar shards, with TFRecord files (by suffix, or numbered like train-00000-of-01024), or with
            a folder for each class.
        first_label: of TFRecord files: label of the first class; ImageNet's begin with 1.
        on_progress: called with the archives indexed and their number.

    Raises:
        DataError: there is nothing of the kind, or more than one of them; or what is there is faulty.
    """
    shards = any(path.glob("*.tar"))
    records = sorted({file for names in TFRECORD_NAMES for file in path.glob(names) if file.is_file()})
    if shards and records:
        raise DataError(f"'{path}' has tar shards and TFRecord files; name a folder with one of them.")
    if shards:
        return labelled_shards(path, on_progress)
    if records:
        return tfrecord_images(records, first_label=first_label, on_progress=on_progress)
    return class_folder(path)
