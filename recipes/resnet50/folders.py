"""Which images there are and of which class: folders with a subfolder for each class, as torchvision's ImageFolder."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

from fasttrain.errors import DataError, nearest


@dataclass(frozen=True, eq=False)
class LabelledFiles:
    """Image files with a class each."""

    paths: list[str]
    labels: NDArray[np.int64]  # (images,): index into class_names
    class_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.paths)


def read_folder(folder: Path, class_names: tuple[str, ...] | None = None) -> LabelledFiles:
    """Return the images of a folder, classes numbered by name.

    Args:
        folder: with a subfolder for each class and images at any depth in it.
        class_names: of the training set, by which an evaluation set is numbered; it may lack some of them.

    Raises:
        DataError: no such folder, no class or no image in it, or a class that training doesn't have.
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder '{folder}'; it is to have a subfolder with images for each class.")
    try:
        found, _ = find_classes(str(folder))
    except FileNotFoundError:
        raise DataError(f"'{folder}' has no subfolders; a folder with images for each class is needed.") from None
    names = tuple(found) if class_names is None else class_names
    for name in found:
        if name not in names:
            raise DataError(f"'{folder}' has a class '{name}' that the training set lacks; {nearest(name, names)}")
    numbers = {name: number for number, name in enumerate(names)}
    present = {name: numbers[name] for name in found}
    samples = make_dataset(str(folder), present, extensions=IMG_EXTENSIONS, allow_empty=True)
    labels = np.array([label for _, label in samples], dtype=np.int64)
    for name in found:
        if not np.any(labels == numbers[name]):
            kinds = ", ".join(IMG_EXTENSIONS)
            raise DataError(f"the class folder '{folder / name}' has no images ({kinds}); fill it or remove it.")
    return LabelledFiles([path for path, _ in samples], labels, names)
