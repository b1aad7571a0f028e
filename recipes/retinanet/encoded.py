"""The set's image files, encoded."""

import os

import numpy as np
from numpy.typing import NDArray

from fasttrain.recipes.image_sets.files import read_file
from fasttrain.recipes.retinanet.coco import ImageTable


class EncodedImages:
    """The files of an image table. EncodedSamples."""

    def __init__(self, images: ImageTable) -> None:
        self.images, self._folder = images, str(images.folder)

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> NDArray[np.uint8]:
        """Return the whole file, (length,) uint8, or raise DataError."""
        return read_file(self.name(index))

    def name(self, index: int) -> str:
        """Return the file's path."""
        return os.path.join(self._folder, self.images.name(index))  # a Path takes as long as a small file

    def annotated_size(self, index: int) -> tuple[int, int]:
        """Return the height and width that the annotation file gives."""
        width, height = self.images.sizes[index].tolist()
        return height, width
