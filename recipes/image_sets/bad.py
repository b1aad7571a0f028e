"""What is done about image files that can't be used, and how they are counted.

Under "skip",

- in training the next usable image of the set takes the place of a bad one, so every batch keeps its shape and holds
  real images only: a blank one would count in the statistics of trainable batch normalization;
- in evaluation the sample is blank and counts as missed: a score can only fall by unreadable images, never rise.

Either way a batch's `bad_image_id` carries the index of the unusable image, -1 for a good sample, out of the worker
process to `BadImages`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from torch import Tensor

from fasttrain.errors import DataError

ImagePolicy = Literal["error", "skip"]
MAX_UNUSABLE_IN_A_ROW = 100


def usable_or_next(
    index: int, size: int, pixels: Callable[[int], Tensor | None], path: Callable[[int], object]
) -> tuple[int, Tensor]:
    """Return an image and its index: the one asked for, or the next one of the set that can be used.

    Args:
        index: of the image wanted.
        size: images in the set.
        pixels: gives an image by index, or None for one that can't be used.
        path: gives its file, for the error.

    Raises:
        DataError: neither it nor one of the next 99 can be used.
    """
    tried = min(size, MAX_UNUSABLE_IN_A_ROW)
    for step in range(tried):
        other = (index + step) % size
        found = pixels(other)
        if found is not None:
            return other, found
    raise DataError(
        f"'{path(index)}' and the {tried - 1} images after it can't be used; replace them, or set "
        "data.on_bad_image=error to see what is wrong with the first."
    )


class BadImages:
    """The images that training and evaluation left out."""

    def __init__(self) -> None:
        self._found: dict[str, set[int]] = {"train": set(), "val": set()}

    def note(self, batch: Mapping[str, Tensor], training: bool) -> None:
        """Take over a batch's `bad_image_id`, while it is still on the CPU."""
        bad = batch["bad_image_id"]
        if bad.max() >= 0:
            self.add("train" if training else "val", (index for index in bad.tolist() if index >= 0))

    def add(self, split: str, indices: Iterable[int]) -> None:
        """Take over indices found some other way."""
        self._found[split].update(indices)

    def count(self, split: str, name: Callable[[int], str]) -> dict[str, int]:
        """Return how many there are in a split, under a text that names the first; nothing for none."""
        bad = self._found[split]
        return {f"{split}: images that can't be used, the first of them '{name(min(bad))}'": len(bad)} if bad else {}
