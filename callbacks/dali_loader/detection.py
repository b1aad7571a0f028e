"""Detection pictures: decoded, resized to one size, mirrored where the host's draw says so; targets ride along."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fasttrain.callbacks.dali_loader.config import DALIConfig
from fasttrain.callbacks.dali_loader.graph import Device
from fasttrain.order import SampleKey

Targets = Callable[[Sequence[SampleKey]], Mapping[str, NDArray[Any]]]
PixelType = Literal["uint8", "float16", "float32"]
FLIPPED, EXTENT = "flipped", "extent"


class DetectionGraph:
    """Batches of `images` and of whatever `targets` gives.

    Args:
        targets: for keys, arrays of static shapes by name: boxes padded and mirrored already, labels, and so on. One of
            them, `flipped`, bool (B,), says which images to mirror, and does not come with the batch.
        image_size: height and width. Bilinear, half-pixel centres, no antialiasing, aspect ratio not kept.
        config: of the decoder.
        dtype: of the images. uint8 are grey levels as decoded; floats are normalized.
        mean, std: of each channel, RGB, on a scale where white is 1. For floats.
    """

    def __init__(
        self,
        targets: Targets,
        image_size: tuple[int, int],
        config: DALIConfig | None = None,
        *,
        dtype: PixelType = "uint8",
        mean: Sequence[float] = (0.0, 0.0, 0.0),
        std: Sequence[float] = (1.0, 1.0, 1.0),
    ) -> None:
        self.targets, self.image_size, self.config = targets, image_size, config or DALIConfig()
        self.dtype, self.mean, self.std = dtype, tuple(mean), tuple(std)

    def parameters(self, keys: Sequence[SampleKey]) -> dict[str, NDArray[Any]]:
        """Return the targets, and the extent (B, 2) of each image; a negative width mirrors it."""
        targets = dict(self.targets(keys))
        extent = np.tile(np.array(self.image_size, np.float32), (len(keys), 1))
        extent[targets.pop(FLIPPED), 1] *= -1
        return {EXTENT: extent, **targets}

    def outputs(self, encoded: Any, parameters: Mapping[str, Any], device: Device) -> dict[str, Any]:
        """Return `images`, HWC, and the targets."""
        from nvidia.dali import fn, types

        on_gpu = device == "gpu"
        options = self.config.decoder_options() if on_gpu else {}
        images = fn.decoders.image(encoded, device="mixed" if on_gpu else "cpu", output_type=types.RGB, **options)
        given = dict(parameters)
        exact = self.dtype != "uint8"
        images = fn.resize(
            images, size=given.pop(EXTENT), interp_type=types.INTERP_LINEAR, antialias=False,
            dtype=types.FLOAT if exact else types.UINT8,
        )  # fmt: skip
        if exact:
            images = fn.crop_mirror_normalize(
                images,
                dtype=types.FLOAT16 if self.dtype == "float16" else types.FLOAT,
                output_layout="HWC",
                mean=[255 * value for value in self.mean],
                std=[255 * value for value in self.std],
            )
        targets = {name: node.gpu() if on_gpu else node for name, node in given.items()}
        return {"images": images, **targets}
