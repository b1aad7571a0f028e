"""The set's image files as DALI takes them: bytes that it decodes to the pixels that `images.load_image` gives."""

import os

import numpy as np
from numpy.typing import NDArray

from fasttrain.callbacks import image_header, portable_pixmap
from fasttrain.recipes.image_sets.files import decode_image, read_file
from fasttrain.recipes.retinanet.coco import ImageTable


class EncodedImages:
    """The files of an image table. What DALI might decode otherwise, or not at all, is decoded here."""

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

    def prepare(self, index: int, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the file's bytes, or its pixels as a PPM where its head shows something uncommon.

        Uncommon are formats but JPEG and PNG, other than 8 bits, CMYK, a missing end, and another size than annotated,
        which may be that of the image before or after EXIF turns it.

        Raises:
            DataError: it can't be used; see `images.decode_image`.
        """
        header = image_header(data)
        width, height = self.images.sizes[index].tolist()
        if header is not None and header.is_whole and header.upright_size == (height, width):
            return data
        return self.decoded(index, data)

    def decoded(self, index: int, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the file's pixels as a PPM, or raise DataError if it can't be used."""
        record = self.images[index]
        pixels = decode_image(record.path, data, (record.height, record.width))
        return portable_pixmap(pixels.permute(1, 2, 0).numpy())
