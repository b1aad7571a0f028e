"""Validation without the samples that a distributed sampler adds to give all ranks the same number."""

from typing import Any

from torch.utils.data import DistributedSampler

from fasttrain.errors import OptimizationError


def leave_out_padding(loaders: Any) -> int:
    """Have the loaders' samplers give every sample to one rank; return how many were given to two.

    Torch's sampler, which Lightning puts into every loader, repeats the first samples behind the last ones, and their
    detections would be scored twice. Mutates the samplers, before they are gone through.
    """
    added = 0
    for sampler in _samplers(loaders):
        added += _padding(sampler)
        whole = _size(sampler)
        sampler.total_size = whole
        sampler.num_samples = len(range(sampler.rank, whole, sampler.num_replicas))
    return added


def check_padding(loaders: Any) -> None:
    """See that no sample is given to two ranks.

    Raises:
        OptimizationError: one is.
    """
    for sampler in _samplers(loaders):
        if padding := _padding(sampler):
            raise OptimizationError(
                f"async_scoring: {padding} of {_size(sampler)} validation samples would be scored twice, because "
                f"{type(sampler).__name__} gives them to two ranks; split them by "
                "fasttrain.order.EpochOrder(..., even=False) and set use_distributed_sampler=False."
            )


def _samplers(loaders: Any) -> list[Any]:
    """Return the samplers that pad, of loaders in any nesting of lists and dictionaries."""
    if isinstance(loaders, dict):
        loaders = list(loaders.values())
    if isinstance(loaders, list | tuple):
        return [sampler for loader in loaders for sampler in _samplers(loader)]
    sampler = getattr(loaders, "sampler", None)
    pads = isinstance(sampler, DistributedSampler) and not getattr(sampler, "drop_last", True)
    return [sampler] if pads and hasattr(sampler, "total_size") else []


def _size(sampler: Any) -> int:
    return len(sampler.dataset)


def _padding(sampler: Any) -> int:
    return max(0, int(sampler.total_size) - _size(sampler))
