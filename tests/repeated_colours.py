"""JPEGs as a GPU decodes them unless it is told to interpolate colours."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fasttrain.callbacks.dali_loader import EncodedSamples, portable_pixmap
from fasttrain.callbacks.dali_loader.reference import repeated_colours


class Repeated:
    """Encoded samples, some of them decoded already.

    Args:
        samples: those that any decoder decodes as it is.
        turns: by index, for JPEGs of subsampling 4:2:0: quarters of a turn to the left that their EXIF asks for.
    """

    def __init__(self, samples: EncodedSamples, turns: Mapping[int, int]) -> None:
        self.samples, self.turns = samples, turns

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> NDArray[np.uint8]:
        data = self.samples.read(index)
        return portable_pixmap(np.rot90(repeated_colours(data), self.turns[index])) if index in self.turns else data

    def name(self, index: int) -> str:
        return self.samples.name(index)
