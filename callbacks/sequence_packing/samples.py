"""The samples behind a user's training loader, asked for as that loader would ask."""

from collections.abc import Mapping
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from fasttrain.order import EpochOrder, SampleKey

KNOWN_SAMPLERS = (RandomSampler, SequentialSampler, DistributedSampler, EpochOrder)


class Samples(Dataset[Any]):
    """A loader's data set, by number and epoch.

    Args:
        loader: for which `why_not_packable` has no reason.
        drop: keys of a sample to leave out.
    """

    def __init__(self, loader: "DataLoader[Any]", drop: frozenset[str] = frozenset()) -> None:
        self.dataset: Any = loader.dataset
        self.by_sample_key, self.drop = isinstance(loader.sampler, EpochOrder), drop
        if callable(told := getattr(loader.dataset, "lengths", None)):
            self.lengths = told

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.visit(0, index)

    def visit(self, epoch: int, index: int) -> Any:
        """Return a sample as it is in an epoch, without what is dropped."""
        sample = self.dataset[SampleKey(epoch, index) if self.by_sample_key else index]
        if not self.drop or not isinstance(sample, Mapping):
            return sample
        return {name: value for name, value in sample.items() if name not in self.drop}


def why_not_packable(loader: Any) -> str:
    """Return why a training loader can't be packed, the beginning of a sentence, or nothing."""
    if not isinstance(loader, DataLoader):
        return f"the training loader is a {type(loader).__name__}, and packing needs one torch DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return (
            f"{type(loader.dataset).__name__} is an iterable data set, whose sequences can't be fetched by number: "
            "make it map-style, or pack its stream with `pack_stream`"
        )
    for chooses, known in ((loader.batch_sampler, (BatchSampler,)), (loader.sampler, KNOWN_SAMPLERS)):
        replaces = isinstance(chooses, RandomSampler) and chooses.replacement
        if type(chooses) not in known or replaces:
            how = " with replacement" if replaces else ""
            return (
                f"the training loader chooses its samples by a {type(chooses).__name__}{how}, and packing deals each "
                "sample once an epoch: it would pass over that choice"
            )
    return ""
