"""A classification set as a map-style dataset: decoded, cropped, resized, flipped images of static shape.

A sample depends on nothing but its `SampleKey` and the seed, so the number of workers, the batch size and a resume
change nothing. What "skip" does with an image file that can't be used is told in `image_sets.bad`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from fasttrain.callbacks import LabelledImages
from fasttrain.crop_windows import DRAWS, centre_starts, random_windows, resized_sizes
from fasttrain.errors import DataError
from fasttrain.order import SampleKey
from fasttrain.recipes.image_sets.bad import ImagePolicy, usable_or_next
from fasttrain.recipes.image_sets.files import decode_image
from fasttrain.sample_random import fair_coins, sample_bits, sample_states, uniforms

if TYPE_CHECKING:
    from jaxtyping import UInt8
    from numpy.typing import NDArray

Batch = dict[str, Tensor]
NO_LABEL, BLANK = -1, -1
MIX_STREAM = 1  # apart from the stream that windows and flips are drawn from


@dataclass(frozen=True)
class Augmentation:
    """What training makes of an image at each visit."""

    seed: int
    area: tuple[float, float]
    aspect: tuple[float, float]
    flip: bool
    mixup: float


class ClassificationDataset(Dataset[Batch]):
    """Samples, and batches by `__getitems__`, which `collate` leaves as they are.

    images        uint8   (B, 3, S, S)  RGB, not normalised
    labels        int64   (B,)          class index, -1 for a key of no sample (see `order.EvaluationOrder`)
    bad_image_id  int64   (B,)          index of an image that couldn't be used here, or -1
    mix           float32 (B,)          only with mixup: an image's share of the mixture with its partner, the batch's
                                        image at the same place from the end

    Args:
        images: encoded, with their labels.
        side: of the square images, pixels.
        resize: shorter side before the crop in the middle, in evaluation.
        augmentation: in training; None for evaluation.
        on_bad_image: what an unreadable file leads to.

    Raises:
        DataError: under "error", when a bad image is asked for.
    """

    def __init__(
        self,
        images: LabelledImages,
        side: int,
        resize: int,
        augmentation: Augmentation | None,
        on_bad_image: ImagePolicy = "error",
    ) -> None:
        self.images, self.side, self.resize = images, side, resize
        self.augmentation, self.on_bad_image = augmentation, on_bad_image
        self._labels = np.append(images.labels, NO_LABEL)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: SampleKey | int) -> Batch:
        return {name: values[0] for name, values in self.__getitems__([key]).items()}

    def __getitems__(self, keys: Sequence[SampleKey | int]) -> Batch:
        """Return the samples of a whole batch already together. A plain index stands for epoch 0."""
        visits = [key if isinstance(key, tuple) else SampleKey(0, range(len(self))[int(key)]) for key in keys]
        shown = np.full(len(visits), BLANK, dtype=np.int64)
        loaded: list[Tensor | None] = [None] * len(visits)
        for row, (_, index) in enumerate(visits):
            if index < len(self):
                showing, loaded[row] = self._usable(index)
                shown[row] = BLANK if loaded[row] is None else showing
        if self.augmentation is None:
            images = self._in_the_middle(loaded)
        else:
            images = self._augmented(visits, loaded, self.augmentation)
        targets = self.targets(visits, shown)
        return {"images": images, **{name: torch.from_numpy(values) for name, values in targets.items()}}

    def targets(self, visits: Sequence[SampleKey], shown: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Return all of a batch but its images.

        Args:
            visits: of the batch.
            shown: (B,) index of the image that is shown, `BLANK` for none.
        """
        index = np.array([visit.index for visit in visits], dtype=np.int64)
        targets: dict[str, NDArray[Any]] = {
            "labels": self._labels[np.where(shown == BLANK, index, shown)],
            "bad_image_id": np.where((index < len(self)) & (shown != index), index, BLANK),
        }
        if self.augmentation is not None and self.augmentation.mixup:
            targets["mix"] = mix_shares(visits, self.augmentation)
        return targets

    def _augmented(
        self, visits: Sequence[SampleKey], loaded: Sequence[Tensor | None], augmentation: Augmentation
    ) -> UInt8[Tensor, "B 3 S S"]:
        states = sample_states(augmentation.seed, visits)
        sizes = np.array([(1, 1) if image is None else _size(image) for image in loaded], dtype=np.int32)
        starts, shapes = random_windows(sizes, uniforms(states, DRAWS), augmentation.area, augmentation.aspect)
        flipped = augmentation.flip & (fair_coins(states) == 1)
        images = self._blank(len(visits))
        for row, image in enumerate(loaded):
            if image is not None:
                (top, left), (height, width) = starts[row].tolist(), shapes[row].tolist()
                image = _resized(image[:, top : top + height, left : left + width], (self.side, self.side))
                images[row] = image.flip(-1) if flipped[row] else image
        return images

    def _in_the_middle(self, loaded: Sequence[Tensor | None]) -> UInt8[Tensor, "B 3 S S"]:
        images = self._blank(len(loaded))
        for row, image in enumerate(loaded):
            if image is not None:
                size = resized_sizes(np.array([_size(image)], dtype=np.int32), self.resize)
                ((top, left),) = centre_starts(size, self.side).tolist()
                image = _resized(image, tuple(size[0].tolist()))
                images[row] = image[:, top : top + self.side, left : left + self.side]
        return images

    def _blank(self, count: int) -> UInt8[Tensor, "B 3 S S"]:
        return torch.zeros((count, 3, self.side, self.side), dtype=torch.uint8)

    def _usable(self, index: int) -> tuple[int, Tensor | None]:
        if self.augmentation is None:
            return index, self._pixels(index)
        return usable_or_next(index, len(self), self._pixels, self.images.encoded.name)

    def _pixels(self, index: int) -> UInt8[Tensor, "3 h w"] | None:
        """Return an image, or None if its file is bad and the policy is to skip it."""
        try:
            return decode_image(self.images.encoded.name(index), self.images.encoded.read(index))
        except DataError:
            if self.on_bad_image == "error":
                raise
            return None


def collate(samples: Batch | Sequence[Batch]) -> Batch:
    """Return samples as one batch."""
    if isinstance(samples, dict):
        return samples
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def mix_shares(visits: Sequence[SampleKey], augmentation: Augmentation) -> NDArray[np.float32]:
    """Return each image's share of its mixture, Beta(mixup, mixup) as in arXiv 1710.09412, one draw an image."""
    alpha, seed = augmentation.mixup, augmentation.seed
    shares = [
        np.random.default_rng((sample_bits(seed, epoch, index), MIX_STREAM)).beta(alpha, alpha)
        for epoch, index in visits
    ]
    return np.array(shares, dtype=np.float32)


def _size(image: Tensor) -> tuple[int, int]:
    """Return width and height."""
    return image.shape[2], image.shape[1]


def _resized(image: UInt8[Tensor, "3 h w"], size: tuple[int, int]) -> UInt8[Tensor, "3 H W"]:
    """Bilinear with antialiasing, as torchvision resizes uint8 tensors."""
    if tuple(image.shape[1:]) == size:
        return image
    return F.interpolate(image[None], size=size, mode="bilinear", antialias=True)[0]
