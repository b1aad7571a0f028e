"""Images with a class each, from encoded bytes to a normalized batch: the training's random crop or the validation's.

In training only the window that was drawn is decoded, then resized, mirrored and normalized. The windows are drawn on
the host with torchvision's distribution, which depends on the image's size and shape: so the sizes come from the
archive's table, or from the header when an image is first seen, and not from inside of the pipeline.

Pixels are those of torchvision's `resize` with antialiasing, to within the rounding to whole grey levels on a CPU.
Those on the border of a window that shrinks differ by up to an eighth of the contrast there: where their filter reaches
out of the window, DALI repeats its last pixel, and torchvision weighs those inside higher.
"""

from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True, eq=False, kw_only=True)
class ClassificationGraph:
    """A LoaderGraph for batches of

    images         fp16 or fp32  (B, S, S, 3) if `channels_last`, else (B, 3, S, S); RGB, normalized
    labels         int64         (B,)       class index
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
    dtype: Literal["fp16", "fp32"] = "fp32"
    """Of the images in a batch."""
    channels_last: bool = True
    """Whether the channels come last in memory, as tensor cores want them."""
    decode_window: bool = True
    """Decode the window alone; false decodes the whole image and then cuts it out, for decoders that prefer that."""
    decoder: Mapping[str, float | int | bool] = field(default_factory=lambda: {"hw_decoder_load": 0.9})
    """Options of DALI's GPU decoder: share of the hardware decoder, preallocation hints. Not used on a CPU."""

    def __post_init__(self) -> None:
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ConfigError(f"scale is {self.scale}; parts of an image's area are needed, 0 < low <= high <= 1.")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ConfigError(f"ratio is {self.ratio}; width / height is needed, 0 < low <= high.")
        if self.mixup_alpha < 0:
            raise ConfigError(f"mixup_alpha is {self.mixup_alpha}; 0 or more is needed, 0 mixes nothing.")
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
        """Return labels and windows, and in training mirrors and mixup's partners and weights, for each key.

        Raises:
            DataError: the size of an image is needed whose header can't be read.
        """
        indices = np.array([key.index for key in keys], dtype=np.int64)
        sizes = self.samples.image_sizes(indices)
        labels = self.samples.labels[indices]
        if not self.augment:
            resized = resized_sizes(sizes, self.resize_size)
            start = centre_starts(resized, self.image_size)
            return {"labels": labels, "resized": resized.astype(np.float32), "crop_start": start}
        state = sample_states(self.seed, keys)
        start, shape = random_windows(sizes, uniforms(state, DRAWS), self.scale, self.ratio)
        drawn: dict[str, NDArray[np.generic]] = {"labels": labels, "crop_start": start, "crop_shape": shape}
        if self.flip:
            drawn["mirror"] = fair_coins(state)
        if self.mixes:
            partner = np.roll(np.arange(len(labels), dtype=np.int32), 1)
            drawn |= {
                "mixup_partner": partner,
                "mixup_labels": labels[partner],
                "mixup_weight": self._mixup_weights(keys),
            }
        return drawn

    def outputs(self, encoded: Any, parameters: Mapping[str, Any], device: Device) -> Mapping[str, Any]:
        """Return the data nodes of images and labels, and with mixup those of the second labels and the weights."""
        from nvidia.dali import fn, types

        pixels = self._window(encoded, parameters, device)
        mixed = self.mixes
        images = fn.crop_mirror_normalize(
            pixels,
            dtype=types.FLOAT if mixed or self.dtype == "fp32" else types.FLOAT16,
            output_layout="HWC" if self.channels_last else "CHW",
            mirror=parameters.get("mirror", 0),
            mean=[255 * value for value in self.mean],
            std=[255 * value for value in self.std],
        )
        names = ["labels"]
        if mixed:
            names += ["mixup_labels", "mixup_weight"]
            weight = _on(parameters["mixup_weight"], device)
            other = fn.permute_batch(images, indices=parameters["mixup_partner"])
            images = images * weight + other * (1 - weight)
            if self.dtype == "fp16":
                images = fn.cast(images, dtype=types.FLOAT16)
        return {"images": images} | {name: _on(parameters[name], device) for name in names}

    def _window(self, encoded: Any, parameters: Mapping[str, Any], device: Device) -> Any:
        """Return the decoded window in its final size, uint8 (S, S, 3)."""
        from nvidia.dali import fn, types

        where = {"start": parameters["crop_start"], "axis_names": "HW"}
        size = [self.image_size, self.image_size]
        resize = {"interp_type": types.INTERP_LINEAR, "antialias": True}
        decode: dict[str, Any] = {"device": "cpu", "output_type": types.RGB}
        if device == "gpu":
            decode |= {"device": "mixed", **self.decoder}
        if not self.augment:
            whole = fn.decoders.image(encoded, **decode)
            return fn.slice(fn.resize(whole, size=parameters["resized"], **resize), shape=size, **where)
        where["shape"] = parameters["crop_shape"]
        if self.decode_window:
            window = fn.decoders.image_slice(encoded, **where, **decode)
        else:
            window = fn.slice(fn.decoders.image(encoded, **decode), **where)
        return fn.resize(window, size=size, **resize)

    def _mixup_weights(self, keys: Sequence[SampleKey]) -> NDArray[np.float32]:
        """Return a weight for each sample of the batch that begins with this one."""
        if not keys:
            return np.zeros(0, dtype=np.float32)
        generator = np.random.default_rng((self.seed % 2**64, *keys[0]))
        return generator.beta(self.mixup_alpha, self.mixup_alpha, len(keys)).astype(np.float32)


def _on(node: Any, device: Device) -> Any:
    return node.gpu() if device == "gpu" else node
