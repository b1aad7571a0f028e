"""A classification set in whatever holds it, told by what lies at its path."""

from collections.abc import Callable
from pathlib import Path

from fasttrain.callbacks.dali_loader.labelled import LabelledImages, class_folder
from fasttrain.callbacks.dali_loader.tar_shards import labelled_shards
from fasttrain.callbacks.dali_loader.tfrecord import tfrecord_images
from fasttrain.errors import DataError

TFRECORD_NAMES = ("*.tfrecord", "*.tfrecords", "*-?????-of-?????")


def labelled_images(
    path: Path,
    *,
    first_label: int = 0,
    class_names: tuple[str, ...] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> LabelledImages:
    """Return the images at a path with their labels.

    Args:
        path: a folder with tar shards, with TFRecord files (by suffix, or numbered like train-00000-of-01024), or with
            a folder for each class.
        first_label: of TFRecord files: label of the first class; ImageNet's begin with 1.
        class_names: of the training set, by which an evaluation set is numbered; it may lack some of them. TFRecord
            files, and shards without a manifest, have numbers for names.
        on_progress: called with the archives indexed and their number.

    Raises:
        DataError: there is nothing of the kind, or more than one of them; what is there is faulty; or it has a class
            that isn't among `class_names`.
    """
    found = _in_any_container(path, first_label, on_progress)
    return found if class_names is None else found.numbered_as(class_names, path)


def _in_any_container(path: Path, first_label: int, on_progress: Callable[[int, int], None] | None) -> LabelledImages:
    shards = any(path.glob("*.tar"))
    records = sorted({file for names in TFRECORD_NAMES for file in path.glob(names) if file.is_file()})
    if shards and records:
        raise DataError(f"'{path}' has tar shards and TFRecord files; name a folder with one of them.")
    if shards:
        return labelled_shards(path, on_progress)
    if records:
        return tfrecord_images(records, first_label=first_label, on_progress=on_progress)
    return class_folder(path)
