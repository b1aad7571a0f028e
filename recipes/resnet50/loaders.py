"""The two loaders of a classification set: torch's, which is the reference, and DALI's, with the same batches."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fasttrain.callbacks import ClassificationGraph, DALIConfig, DALILoader
from fasttrain.order import EpochOrder, ResumableLoader, SampleKey
from fasttrain.recipes.image_sets.encoded import UsableImages
from fasttrain.recipes.image_sets.loader import image_loader
from fasttrain.recipes.resnet50.dataset import ClassificationDataset, collate


def torch_loader(
    dataset: ClassificationDataset, order: EpochOrder, batch_size: int, *, workers: int | None, on_gpu: bool
) -> ResumableLoader:
    """Return batches of the CPU, made by `workers` processes; None is what this machine has to spare."""
    return image_loader(
        dataset, order, workers, on_gpu=on_gpu, batch_size=batch_size, drop_last=True, collate_fn=collate
    )


def dali_loader(
    dataset: ClassificationDataset, order: EpochOrder, batch_size: int, *, device: torch.device, config: DALIConfig
) -> DALILoader:
    """Return the same batches on a device, images in channels_last, without processes.

    They stay uint8: normalizing and mixing is the model's, a captured step's first kernels.
    """
    augmentation = dataset.augmentation
    samples = UsableImages(dataset.images.encoded, dataset.on_bad_image, training=augmentation is not None)

    def targets(keys: Sequence[SampleKey]) -> dict[str, NDArray[Any]]:
        return dataset.targets(keys, samples.shown[np.array([key.index for key in keys], dtype=np.int64)])

    training: dict[str, Any] = {}
    if augmentation is not None:
        training = {"seed": augmentation.seed, "scale": augmentation.area, "ratio": augmentation.aspect}
        training |= {"flip": augmentation.flip}
    graph = ClassificationGraph(
        samples=replace(dataset.images, encoded=samples, image_sizes=samples.sizes),
        augment=augmentation is not None,
        image_size=dataset.side,
        resize_size=dataset.resize,
        dtype="uint8",
        targets=targets,
        decoder=config.decoder_options(),
        **training,
    )
    return DALILoader(samples, graph, order, batch_size, drop_last=True, device=device, config=config)
