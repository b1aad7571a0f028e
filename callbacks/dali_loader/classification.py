"""Images with a class each, from encoded bytes to a normalized batch: the training's random crop or the validation's.

In training the window that was drawn is decoded, resized, mirrored and normalized. The windows are drawn on the
host with torchvision's distribution, which depends on the image's size and shape: so the sizes come from the
archive's table, or from the header when an image is first seen, and not from inside of the pipeline.

Pixels are those of torchvision's `resize` with antialiasing, to within the rounding to whole grey levels on a CPU.
Those on the border of a window that shrinks differ by up to an eighth of the contrast there: where their filter reaches
out of the window, DALI repeats its last pixel, and torchvision weighs those inside higher.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fasttrain.callbacks.dali_loader.graph import Device
from fasttrain.callbacks.dali_loader.labelled import LabelledImages
from fasttrain.crop_windows import DRAWS, centre_starts, random_windows, resized_sizes
from fasttrain.errors import ConfigError
from fasttrain.order import SampleKey
from fasttrain.sample_random import fair_coins, sample_states, uniforms

IMAGENET_MEAN = (0.485, 0.456, 0.406)  # red, green, blue in 0..1, as torchvision's models and NVIDIA's MLPerf v2.0
IMAGENET_STD = (0.229, 0.224, 0.225)

EXTENT, START, SHAPE, PARTNER = "extent", "crop_start", "crop_shape", "mixup_partner"
HOST_ONLY = {EXTENT, START, SHAPE, PARTNER}
Targets = Callable[[Sequence[SampleKey]], Mapping[str, NDArray[Any]]]


@dataclass(frozen=True, eq=False, kw_only=True)
class ClassificationGraph:
    """A LoaderGraph for batches of

    images         `dtype`       (B, S, S, 3) if `channels_last`, else (B, 3, S, S); RGB, floats normalized
    labels         int64         (B,)       class index; in the place of labels whatever `targets` gives, if it is given
    mixup_labels   int64         (B,)       with mixup only: class of the image that was mixed in
    mixup_weight   float32       (B,)       and the weight of the first, so that the loss is
                                            weight * loss(labels) + (1 - weight) * loss(mixup_labels)
    """

    samples: LabelledImages
    augment: bool
    """Random resized crop, mirror and mixup; else the centre crop."""
    seed: int = 0
    """Of the augmentation."""
    image_size: int = 224
    """Side of the images in a batch, pixels."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Bounds of a window's part of the image's area: torchvision's. MLPerf's reference has (0.05, 1.0)."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Bounds of a window's width / height."""
    flip: bool = True
    """Mirror half of the training images."""
    mixup_alpha: float = 0.0
    """Weights are drawn from Beta(alpha, alpha); 0 mixes nothing. Method: Zhang et al., "mixup", 2018."""
    resize_size: int = 256
    """Shorter side that validation images are resized to before `image_size` is cut out of their middle."""
    mean: tuple[float, float, float] = IMAGENET_MEAN
    """Of red, green and blue in 0..1; subtracted."""
    std: tuple[float, float, float] = IMAGENET_STD
    """What is then divided by."""
    dtype: Literal["uint8", "fp16", "fp32"] = "fp32"
    """Of the images in a batch. uint8 are grey levels, for a step that normalizes, and mixes, by itself."""
    channels_last: bool = True
    """Whether the channels come last in memory, as tensor cores want them."""
    decode_window: bool | None = None
    """Decode the window alone, or the whole image and then cut it out; null does what is faster, the window on a CPU
    and the whole on a GPU."""
    decoder: Mapping[str, float | int | bool] = field(default_factory=lambda: {"hw_decoder_load": 0.9})
    """Options of DALI's GPU decoder: share of the hardware decoder, preallocation hints. Not used on a CPU."""
    targets: Targets | None = None
    """For keys, arrays of static shapes by name that come with the batch instead of labels."""

    def __post_init__(self) -> None:
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ConfigError(f"scale is {self.scale}; parts of an image's area are needed, 0 < low <= high <= 1.")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ConfigError(f"ratio is {self.ratio}; width / height is needed, 0 < low <= high.")
        if self.mixup_alpha < 0:
            raise ConfigError(f"mixup_alpha is {self.mixup_alpha}; 0 or more is needed, 0 mixes nothing.")
        if self.mixup_alpha and (self.dtype == "uint8" or self.targets is not None):
            raise ConfigError(
                f"mixup_alpha is {self.mixup_alpha}, but {self.dtype} images and targets of one's own are mixed in the "
                "step; take fp16 or fp32 and no targets, or 0."
            )
        if not self.augment and self.resize_size < self.image_size:
            raise ConfigError(
                f"resize_size is {self.resize_size}, but {self.image_size} x {self.image_size} pixels are cut out of "
                "the resized image; raise it."
            )

    @property
    def mixes(self) -> bool:
        """Whether batches have mixup's entries."""
        return self.augment and self.mixup_alpha > 0

    def parameters(self, keys: Sequence[SampleKey]) -> Mapping[str, NDArray[np.generic]]:
        """Return labels and windows, and in training mixup's partners and weights, for each key.

        An extent is the size that an image or its window is resized to; a negative width mirrors it.

        Raises:
            DataError: the size of an image is needed whose header can't be read.
        """
        indices = np.array([key.index for key in keys], dtype=np.int64)
        sizes = self.samples.image_sizes(indices)
        targets = self.targets(keys) if self.targets is not None else {"labels": self.samples.labels[indices]}
        if not self.augment:
            resized = resized_sizes(sizes, self.resize_size)
            start = centre_starts(resized, self.image_size)
            return {**targets, EXTENT: resized.astype(np.float32), START: start}
        state = sample_states(self.seed, keys)
        start, shape = random_windows(sizes, uniforms(state, DRAWS), self.scale, self.ratio)
        extent = np.full((len(keys), 2), self.image_size, dtype=np.float32)
        if self.flip:
            extent[fair_coins(state) == 1, 1] *= -1
        drawn = {**targets, EXTENT: extent, START: start, SHAPE: shape}
        if self.mixes:
            labels = targets["labels"]
            partner = np.roll(np.arange(len(labels), dtype=np.int32), 1)
            drawn |= {
                PARTNER: partner,
                "mixup_labels": labels[partner],
                "mixup_weight": self._mixup_weights(keys),
            }
        return drawn

    def outputs(self, encoded: Any, parameters: Mapping[str, Any], device: Device) -> Mapping[str, Any]:
        """Return the data nodes of the images and of all that comes with them."""
        from nvidia.dali import fn, types

        images = self._window(encoded, parameters, device)
        if self.dtype != "uint8" or not self.channels_last:
            exact = self.dtype == "fp32" or self.mixes
            images = fn.crop_mirror_normalize(
                images,
                dtype=types.UINT8 if self.dtype == "uint8" else types.FLOAT if exact else types.FLOAT16,
                output_layout="HWC" if self.channels_last else "CHW",
                mean=0.0 if self.dtype == "uint8" else [255 * value for value in self.mean],
                std=1.0 if self.dtype == "uint8" else [255 * value for value in self.std],
            )
        targets = {name: _on(node, device) for name, node in parameters.items() if name not in HOST_ONLY}
        if self.mixes:
            weight = targets["mixup_weight"]
            other = fn.permute_batch(images, indices=parameters[PARTNER])
            images = images * weight + other * (1 - weight)
            if self.dtype == "fp16":
                images = fn.cast(images, dtype=types.FLOAT16)
        return {"images": images, **targets}

    def _window(self, encoded: Any, parameters: Mapping[str, Any], device: Device) -> Any:
        """Return the decoded window in its final size, mirrored or not, uint8 (S, S, 3)."""
        from nvidia.dali import fn, types

        where = {"start": parameters[START], "axis_names": "HW"}
        resize = {"size": parameters[EXTENT], "interp_type": types.INTERP_LINEAR, "antialias": True}
        decode: dict[str, Any] = {"device": "cpu", "output_type": types.RGB}
        if device == "gpu":
            decode |= {"device": "mixed", **self.decoder}
        if not self.augment:
            whole = fn.decoders.image(encoded, **decode)
            return fn.slice(fn.resize(whole, **resize), shape=[self.image_size, self.image_size], **where)
        where["shape"] = parameters[SHAPE]
        if device == "cpu" if self.decode_window is None else self.decode_window:
            window = fn.decoders.image_slice(encoded, **where, **decode)
        else:
            window = fn.slice(fn.decoders.image(encoded, **decode), **where)
        return fn.resize(window, **resize)

    def _mixup_weights(self, keys: Sequence[SampleKey]) -> NDArray[np.float32]:
        """Return a weight for each sample of the batch that begins with this one."""
        if not keys:
            return np.zeros(0, dtype=np.float32)
        generator = np.random.default_rng((self.seed % 2**64, *keys[0]))
        return generator.beta(self.mixup_alpha, self.mixup_alpha, len(keys)).astype(np.float32)


def _on(node: Any, device: Device) -> Any:
    return node.gpu() if device == "gpu" else node
