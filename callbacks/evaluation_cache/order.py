"""Whether a loader goes through its samples in the same order each time, as far as its sampler tells."""

from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

AT_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def why_not_in_order(loaders: Any) -> str | None:
    """Return that a loader, of any nesting of lists and dictionaries, has an order at random; None if none says so."""
    if isinstance(loaders, dict):
        loaders = list(loaders.values())
    if isinstance(loaders, list | tuple):
        return next(filter(None, map(why_not_in_order, loaders)), None)
    batch_sampler = getattr(loaders, "batch_sampler", None)
    inner = batch_sampler.sampler if isinstance(batch_sampler, BatchSampler) else None
    for sampler in (getattr(loaders, "sampler", None), getattr(loaders, "order", None), inner):
        if isinstance(sampler, AT_RANDOM) or (isinstance(sampler, DistributedSampler) and sampler.shuffle):
            return f"the validation loader's samples come in another order each time ({type(sampler).__name__})"
    return None
