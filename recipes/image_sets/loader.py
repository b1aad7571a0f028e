"""The loaders of recipes on images: how many workers there are, and pinned memory for a GPU."""

from typing import Any

from torch.utils.data import Dataset

from fasttrain.environment import usable_cores
from fasttrain.order import EpochOrder, ResumableLoader

FEW_CORES = 4
MOST_WORKERS = 16


def image_loader(
    dataset: Dataset[Any],
    order: EpochOrder,
    num_workers: int | None,
    *,
    on_gpu: bool,
    in_this_process: bool = False,
    **options: Any,
) -> ResumableLoader:
    """Return a resumable loader.

    Args:
        dataset: indexed by `SampleKey`.
        order: in which order, and which share of it.
        num_workers: loader processes; None is the usable cores less one on a machine with more than 4 of them, else
            none: on few cores workers take from the step what they give.
        on_gpu: whether batches go to one, and are pinned.
        in_this_process: what None means is no worker, for a dataset that keeps images in this process's memory.
        options: of DataLoader.
    """
    workers = num_workers
    if workers is None:
        cores = usable_cores()
        workers = 0 if in_this_process or cores <= FEW_CORES else min(MOST_WORKERS, cores - 1)
    options = {"num_workers": workers, "pin_memory": on_gpu, "persistent_workers": workers > 0, **options}
    return ResumableLoader(dataset, order, **options)
