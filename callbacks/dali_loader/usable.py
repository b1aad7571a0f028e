"""What stands in the place of files that can't be used, when a set may have such.

`error` stops at the first, naming it. `substitute` shows the next usable sample of the set, as training wants: every
batch keeps its shape and holds real samples only. `blank` shows a black picture and leaves it to the graph to say so,
as evaluation wants. No set is read up front: a file is judged when it is read, or when the decoder refuses it.
"""

from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fasttrain.callbacks.dali_loader.encoded import EncodedSamples
from fasttrain.callbacks.dali_loader.header import image_header
from fasttrain.errors import DataError

WhenBad = Literal["error", "substitute", "blank"]
Prepare = Callable[[int, NDArray[np.uint8]], NDArray[np.uint8]]
MAX_UNUSABLE_IN_A_ROW = 100
BLANK, BLANK_SIZE = -1, (8, 8)


@runtime_checkable
class ReplacesBad(Protocol):
    """Encoded samples that can do without some of them."""

    def reject(self, index: int, reason: str) -> None:
        """Learn that the decoder can't use what `read(index)` gave. The next `read(index)` gives something else.

        Raises:
            DataError: nothing else is to be given; the message names the file.
        """


class UsableSamples:
    """Encoded samples, each judged when it is read. The index behind the last one, of no sample, is a blank one.

    Args:
        samples: any container.
        when_bad: see above.
        prepare: takes an index and its bytes, and returns bytes that the decoder takes, or raises DataError. It may
            decode uncommon files itself and return `portable_pixmap`'s bytes.
        rescue: the same for a file that the decoder refused.
    """

    def __init__(
        self, samples: EncodedSamples, when_bad: WhenBad = "error", prepare: Prepare | None = None,
        rescue: Prepare | None = None,
    ) -> None:  # fmt: skip
        self.samples, self.when_bad = samples, when_bad
        self._prepare, self._rescue = prepare or self.whole, rescue
        self._rescued: set[int] = set()
        self.faults: dict[int, str] = {}
        """What is wrong with each file found to be unusable so far."""
        self.shown = np.append(np.arange(len(samples)), BLANK)
        """Which sample `read` gave last for each index, or -1 for a blank one, as for `order.EvaluationOrder`'s keys of
        no sample."""

    def __len__(self) -> int:
        return len(self.samples)

    def name(self, index: int) -> str:
        """Return the name of the sample that is shown for an index."""
        return self.samples.name(index if self.shown[index] == BLANK else int(self.shown[index]))

    def read(self, index: int) -> NDArray[np.uint8]:
        """Return the bytes of a sample, or of what is shown in its place.

        Raises:
            DataError: it can't be used and may not be replaced, or too many after it can't be used either.
        """
        data = self._usable(index) if index < len(self) else None
        if data is not None:
            self.shown[index] = index
            return data
        if self.when_bad == "blank" or index == len(self):
            self.shown[index] = BLANK
            return portable_pixmap(np.zeros((*BLANK_SIZE, 3), np.uint8))
        tried = min(len(self), MAX_UNUSABLE_IN_A_ROW)
        for step in range(1, tried):
            other = (index + step) % len(self)
            data = self._usable(other)
            if data is not None:
                self.shown[index] = other
                return data
        raise DataError(
            f"'{self.samples.name(index)}' and the {tried - 1} samples after it can't be used; replace them, or have "
            "bad ones be an error to see what is wrong with the first."
        )

    def reject(self, index: int, reason: str) -> None:
        """Note that the decoder refused what is shown for an index; see `ReplacesBad`."""
        refused = int(self.shown[index])
        if self._rescue is not None and refused not in self._rescued:
            self._rescued.add(refused)
            return
        self._note(refused, DataError(f"'{self.samples.name(refused)}' can't be decoded ({reason}); replace the file."))

    def whole(self, index: int, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the bytes of a file unless it ends too early, of which decoders may make grey pixels.

        Raises:
            DataError: it is empty, or a JPEG or PNG without its end.
        """
        if not data.size:
            raise DataError(f"'{self.samples.name(index)}' is empty (0 bytes); download or copy it again.")
        header = image_header(data)
        if header is not None and not header.is_whole:
            raise DataError(f"'{self.samples.name(index)}' is cut off before its end; download or copy it again.")
        return data

    def _usable(self, index: int) -> NDArray[np.uint8] | None:
        if index in self.faults:
            return None
        try:
            prepare = self._rescue if self._rescue is not None and index in self._rescued else self._prepare
            return prepare(index, self.samples.read(index))
        except DataError as error:
            self._note(index, error)
            return None

    def _note(self, index: int, error: DataError) -> None:
        if self.when_bad == "error":
            raise error
        self.faults[index] = str(error)


def portable_pixmap(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return an image as the bytes of a PPM file, (length,) uint8, which decoders copy out without a loss.

    Args:
        pixels: (H, W, 3) uint8, RGB; copied.
    """
    height, width, _ = pixels.shape
    head = np.frombuffer(b"P6\n%d %d\n255\n" % (width, height), np.uint8)
    return np.concatenate([head, np.ascontiguousarray(pixels).reshape(-1)])
