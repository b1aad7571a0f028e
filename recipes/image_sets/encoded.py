"""Encoded images as DALI takes them: bytes that it decodes to the pixels that `files.decode_image` gives."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fasttrain.callbacks import EncodedSamples, UsableSamples, WhenBad, image_header, portable_pixmap
from fasttrain.callbacks.dali_loader import BLANK, BLANK_SIZE
from fasttrain.recipes.image_sets.bad import ImagePolicy
from fasttrain.recipes.image_sets.files import decode_image


class UsableImages(UsableSamples):
    """Images judged as torch's loader judges them. What DALI might decode otherwise, or not at all, is decoded here.

    Args:
        samples: in any container.
        on_bad_image: see `image_sets.bad`.
        training: another image takes the place of a bad one; in evaluation it is blank.
        annotated_size: gives the height and width that an image must have, by index.
    """

    def __init__(
        self,
        samples: EncodedSamples,
        on_bad_image: ImagePolicy,
        training: bool,
        annotated_size: Callable[[int], tuple[int, int]] | None = None,
    ) -> None:
        when_bad: WhenBad = "error" if on_bad_image == "error" else "substitute" if training else "blank"
        super().__init__(samples, when_bad, self.prepared, self.decoded)
        self._annotated_size = annotated_size
        self._sizes: NDArray[np.int32] = np.zeros((len(samples) + 1, 2), dtype=np.int32)
        self._sizes[BLANK] = BLANK_SIZE

    def sizes(self, indices: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return (n, 2): width and height of what was read last for n indices, as it is decoded."""
        sizes: NDArray[np.int32] = self._sizes[self.shown[indices]]
        return sizes

    def prepared(self, index: int, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the file's bytes, or its pixels as a PPM where its head shows something uncommon.

        Uncommon are formats but JPEG and PNG, other than 8 bits, CMYK, a missing end, and another size than annotated,
        which may be that of the image before or after EXIF turns it.

        Raises:
            DataError: it can't be used; see `files.decode_image`.
        """
        header, wanted = image_header(data), self._annotated(index)
        if header is None or not header.is_whole or wanted not in (None, header.upright_size):
            return self.decoded(index, data)
        self._sizes[index] = header.upright_size[::-1]
        return data

    def decoded(self, index: int, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the file's pixels as a PPM, or raise DataError if it can't be used."""
        pixels = decode_image(self.samples.name(index), data, self._annotated(index)).permute(1, 2, 0).numpy()
        self._sizes[index] = pixels.shape[1::-1]
        return portable_pixmap(pixels)

    def _annotated(self, index: int) -> tuple[int, int] | None:
        return None if self._annotated_size is None else self._annotated_size(index)
