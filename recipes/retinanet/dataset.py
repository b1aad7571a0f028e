"""A detection set as a map-style dataset: decoded, resized, flipped samples of static shape, and how they form a batch.

A sample depends on nothing but its `SampleKey` and the seed: the flip is drawn from (seed, epoch, index), so the number
of workers, the batch size and a resume change nothing. Crowd boxes are no training targets, as everywhere in COCO
training (MLPerf's reference makes an exception for OpenImages: `crowd_targets`); images without boxes stay and teach
background.

What "skip" does with an image file that can't be used is told in `image_sets.bad`. In evaluation such a sample has no
boxes, but its ground truth counts in the score as if nothing had been found in it: leave out its detections.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from fasttrain.errors import ConfigError, DataError
from fasttrain.order import SampleKey
from fasttrain.recipes.image_sets.bad import ImagePolicy, usable_or_next
from fasttrain.recipes.image_sets.files import load_image
from fasttrain.recipes.retinanet.coco import DetectionSet
from fasttrain.recipes.retinanet.resize import resize
from fasttrain.sample_random import sample_bits

if TYPE_CHECKING:
    from jaxtyping import UInt8

Batch = dict[str, Tensor]
CacheKind = Literal["none", "ram"]

UNKNOWN, CACHED, UNUSABLE = 0, 1, 2
BLANK = -1


class DetectionDataset(Dataset[Batch]):
    """Samples with the keys and shapes of `collate`, without its batch dimension.

    Args:
        detection_set: from `read_annotations`.
        image_size: height and width that all images are resized to.
        max_boxes: capacity of a sample.
        augment: flip left-right with probability 0.5.
        seed: of the flips.
        on_bad_image: what an unreadable image file, or one of another size than annotated, leads to; see above.
        substitute: under "skip", show another image for a bad one, as training wants; None means as `augment`.
        cache: "ram" keeps the resized images, decoding each only once; the memory is shared with forked workers.
        crowd_targets: take crowd boxes for ordinary targets.

    Raises:
        DataError: at construction if an image has more boxes than `max_boxes`, or one that vanishes in the resize;
            later, under "error", at a bad image.
        ConfigError: the cache doesn't fit into this machine's memory.
    """

    def __init__(
        self,
        detection_set: DetectionSet,
        image_size: tuple[int, int],
        max_boxes: int,
        *,
        augment: bool,
        seed: int = 0,
        on_bad_image: ImagePolicy = "error",
        substitute: bool | None = None,
        cache: CacheKind = "none",
        crowd_targets: bool = False,
    ) -> None:
        self.detection_set = detection_set
        self.image_size = image_size
        self.max_boxes = max_boxes
        self.augment, self.seed, self.on_bad_image = augment, seed, on_bad_image
        self.substitute = augment if substitute is None else substitute
        self._targets = _Targets(detection_set, image_size, crowd_targets)
        self._check_capacity()
        self._cache = _Cache(len(detection_set.images), image_size) if cache == "ram" else None

    def __len__(self) -> int:
        return len(self.detection_set.images)

    @property
    def is_cached(self) -> bool:
        """Whether resized images are kept."""
        return self._cache is not None

    def __getitem__(self, key: SampleKey | int) -> Batch:
        return {name: values[0] for name, values in self.__getitems__([key]).items()}

    def __getitems__(self, keys: Sequence[SampleKey | int]) -> Batch:
        """Return the samples of a whole batch already together; DataLoader asks for this one when it can.

        A plain index stands for epoch 0.
        """
        visits = [key if isinstance(key, tuple) else SampleKey(0, int(key)) for key in keys]
        visits = [SampleKey(epoch, range(len(self))[index]) for epoch, index in visits]
        images = torch.empty((len(visits), 3, *self.image_size), dtype=torch.uint8)
        shown = np.empty(len(visits), dtype=np.int64)
        flipped = self.flipped(visits)
        for row, (_, index) in enumerate(visits):
            shown[row], pixels = self._usable(index)
            if pixels is None:
                shown[row], images[row] = BLANK, 0
            else:
                images[row] = pixels.flip(-1) if flipped[row] else pixels
        targets = self.targets(visits, shown, flipped)
        return {"images": images, **{name: torch.from_numpy(values) for name, values in targets.items()}}

    def flipped(self, visits: Sequence[SampleKey]) -> NDArray[np.bool_]:
        """Return for each visit whether its image is mirrored."""
        return np.array([self.augment and flips(self.seed, *visit) for visit in visits], dtype=np.bool_)

    def targets(
        self, visits: Sequence[SampleKey], shown: NDArray[np.int64], flipped: NDArray[np.bool_]
    ) -> dict[str, NDArray[Any]]:
        """Return all of a batch but its images (see `collate`).

        Args:
            visits: of the batch, whose indices are not negative.
            shown: (B,) index of the image that is shown, `BLANK` for none.
            flipped: (B,) of the visits.
        """
        index = np.array([visit.index for visit in visits], dtype=np.int64)
        boxes, labels, count = self._targets.padded(shown, flipped, self.max_boxes)
        image_id = np.where(shown == BLANK, index, shown)
        return {
            "boxes": boxes,
            "labels": labels,
            "box_count": count,
            "image_id": image_id,
            "original_size": self.detection_set.images.sizes[image_id, ::-1].astype(np.int64),
            "bad_image_id": np.where(shown == index, BLANK, index),
        }

    def fault(self, index: int) -> str:
        """Say why the image at `index` can't be used, or return "" if it can; for reporting a `bad_image_id`."""
        record = self.detection_set.images[index]
        try:
            load_image(record.path, (record.height, record.width))
        except DataError as error:
            return str(error)
        return ""

    def _usable(self, index: int) -> tuple[int, UInt8[Tensor, "3 H W"] | None]:
        """Return an image and its index: the one asked for, or what the policy puts in its place."""
        if not self.substitute:
            return index, self._pixels(index)
        return usable_or_next(index, len(self), self._pixels, lambda i: self.detection_set.images[i].path)

    def _pixels(self, index: int) -> UInt8[Tensor, "3 H W"] | None:
        """Return the resized image, or None if its file is bad and the policy is to skip it."""
        state = self._cache.state[index] if self._cache else UNKNOWN
        if state == UNUSABLE:
            return None
        if self._cache and state == CACHED:
            return self._cache.images[index]
        record = self.detection_set.images[index]
        try:
            pixels = resize(load_image(record.path, (record.height, record.width)), self.image_size)
        except DataError:
            if self.on_bad_image == "error":
                raise
            if self._cache:
                self._cache.state[index] = UNUSABLE
            return None
        if self._cache:
            self._cache.put(index, pixels)
        return pixels

    def _check_capacity(self) -> None:
        counts = self._targets.counts
        over = np.flatnonzero(counts > self.max_boxes)
        if over.size:
            most = int(counts.argmax())
            others = f" (and {over.size - 1:,} more images have too many)" if over.size > 1 else ""
            name = self.detection_set.images.name(most)
            raise DataError(
                f"'{self.detection_set.file}': image '{name}' has {counts[most]} boxes{others}, but data.max_boxes is "
                f"{self.max_boxes}; set data.max_boxes={counts[most]}."
            )


def flips(seed: int, epoch: int, index: int) -> bool:
    """Tell whether a sample is mirrored on this visit: a fair coin that is a pure function of its arguments."""
    return sample_bits(seed, epoch, index) >> 63 == 1


def collate(samples: Batch | Sequence[Batch]) -> Batch:
    """Return samples as one batch of contiguous tensors with static shapes.

    images         uint8   (B, 3, H, W)       RGB, resized, not normalised
    boxes          float32 (B, max_boxes, 4)  x1 y1 x2 y2 in pixels of the resized image; padding rows are 0
    labels         int64   (B, max_boxes)     class index; padding is -1
    box_count      int64   (B,)
    image_id       int64   (B,)               index of the image in the annotation file's list
    original_size  int64   (B, 2)             height, width before the resize
    bad_image_id   int64   (B,)               index of an image that couldn't be used here, or -1
    """
    if isinstance(samples, dict):
        return samples
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


class _Targets:
    """The training boxes of all images in pixels of the resized image, scaled once for good."""

    def __init__(self, detection_set: DetectionSet, image_size: tuple[int, int], crowd_targets: bool) -> None:
        self.width = np.float32(image_size[1])
        of_image = np.repeat(np.arange(len(detection_set.images)), np.diff(detection_set.first_box))
        keep = np.ones_like(detection_set.iscrowd) if crowd_targets else ~detection_set.iscrowd
        of_image = of_image[keep]
        self.labels = detection_set.labels[keep]
        self.first = np.searchsorted(of_image, np.arange(len(detection_set.images) + 1))
        self.counts = np.diff(self.first)
        # The same float32 division and product as `scale_boxes`, whose rounding can lead 1e-5 pixels out of the image.
        limits = np.array(image_size[::-1], dtype=np.float32)
        ratios = limits / detection_set.images.sizes.astype(np.float32)
        self.boxes = np.minimum(detection_set.boxes[keep] * np.tile(ratios, (1, 2))[of_image], np.tile(limits, 2))
        vanished = np.flatnonzero(np.any(self.boxes[:, 2:] <= self.boxes[:, :2], axis=1))
        if vanished.size:
            name = detection_set.images.name(int(of_image[vanished[0]]))
            raise DataError(
                f"'{detection_set.file}': a box of image '{name}' has no size left when the image is resized to "
                f"{image_size[1]} x {image_size[0]}; correct or remove it."
            )

    def padded(
        self, images: NDArray[np.int64], flipped: NDArray[np.bool_], max_boxes: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
        """Return boxes, labels and counts of some images, by index; BLANK stands for an image without boxes."""
        boxes = np.zeros((len(images), max_boxes, 4), dtype=np.float32)
        labels = np.full((len(images), max_boxes), -1, dtype=np.int64)
        count = np.where(images < 0, 0, self.counts[images])
        for row, (image, size) in enumerate(zip(images.tolist(), count.tolist(), strict=True)):
            rows = slice(self.first[image], self.first[image] + size)
            boxes[row, :size] = self.boxes[rows]
            labels[row, :size] = self.labels[rows]
            if flipped[row]:
                boxes[row, :size, 0::2] = self.width - self.boxes[rows, 2::-2]
        return boxes, labels, count


class _Cache:
    """Resized images and what is known of each, in anonymous memory that processes made by fork share.

    Pages take up memory when they are first written. /dev/shm isn't used: containers often limit it to 64 MiB.
    """

    def __init__(self, images: int, image_size: tuple[int, int]) -> None:
        height, width = image_size
        size = images * 3 * height * width
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if size > 0.8 * memory:
            raise ConfigError(
                f"data.cache=ram needs {size / 1e9:.1f} GB for {images:,} images of {width} x {height}, but this "
                f"machine has {memory / 1e9:.1f} GB; set data.cache=none, or a smaller data.image_size."
            )
        self.state = np.frombuffer(mmap.mmap(-1, images), dtype=np.uint8)
        self.images = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).view(images, 3, height, width)

    def put(self, index: int, pixels: Tensor) -> None:
        self.images[index] = pixels
        self.state[index] = CACHED
