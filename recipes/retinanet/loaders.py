"""The two loaders of a detection dataset: torch's, which is the reference, and DALI's, with the same batches."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fasttrain.callbacks import DALIConfig, DALILoader, DetectionGraph
from fasttrain.order import EpochOrder, ResumableLoader, SampleKey
from fasttrain.recipes.image_sets.encoded import UsableImages
from fasttrain.recipes.image_sets.loader import image_loader
from fasttrain.recipes.retinanet.dataset import DetectionDataset, collate
from fasttrain.recipes.retinanet.encoded import EncodedImages


def torch_loader(
    dataset: DetectionDataset, order: EpochOrder, batch_size: int, *, drop_last: bool, workers: int | None, on_gpu: bool
) -> ResumableLoader:
    """Return batches of the CPU, made by `workers` processes; None is what this machine has to spare."""
    return image_loader(
        dataset,
        order,
        workers,
        on_gpu=on_gpu,
        in_this_process=dataset.is_cached,
        batch_size=batch_size,
        drop_last=drop_last,
        collate_fn=collate,
    )


def dali_loader(
    dataset: DetectionDataset,
    order: EpochOrder,
    batch_size: int,
    *,
    drop_last: bool,
    device: torch.device,
    config: DALIConfig,
) -> DALILoader:
    """Return the same batches on a device, images in channels_last, without processes.

    They stay uint8: normalizing is the model's, a captured step's first kernels, and floats would be twice the bytes.
    """
    files = EncodedImages(dataset.detection_set.images)
    samples = UsableImages(files, dataset.on_bad_image, dataset.substitute, files.annotated_size)

    def targets(keys: Sequence[SampleKey]) -> dict[str, NDArray[Any]]:
        flipped = dataset.flipped(keys)
        shown = samples.shown[np.array([key.index for key in keys], dtype=np.int64)]
        return {"flipped": flipped, **dataset.targets(keys, shown, flipped)}

    graph = DetectionGraph(targets, dataset.image_size, config)
    return DALILoader(samples, graph, order, batch_size, drop_last=drop_last, device=device, config=config)
