"""The order in which samples are seen: seeded, split over ranks, and resumable in the middle of an epoch.

A sampler here yields `SampleKey(epoch, index)`. A dataset that draws its augmentation from (seed, epoch, index) is
then a pure function of the key: the same batch comes out whatever the number of workers, and a resumed run needs no
random state of any worker to go on exactly where it stopped.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from fasttrain.errors import FasttrainError


class SampleKey(NamedTuple):
    """One visit of one sample: the epoch it happens in and the sample's index in the dataset."""

    epoch: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody misses here


class EpochOrder(DistributedSampler[Any]):
    """Yields every sample of one rank's share once an epoch, as `SampleKey`s, in an order set by (seed, epoch).

    Args:
        size: number of samples in the dataset.
        shuffle: a new permutation each epoch, equal on all ranks; otherwise ascending.
        seed: of the permutation.
        rank, world_size: this process's share is every `world_size`-th sample from `rank` on.
        even: leave out up to `world_size - 1` samples of an epoch so that all ranks get the same count, which
            training under DDP needs. Evaluation leaves it off: each sample is seen exactly once, none twice.

    It subclasses DistributedSampler because Lightning recognizes by that a sampler that splits over ranks itself.
    """

    def __init__(
        self, size: int, *, shuffle: bool, seed: int, rank: int = 0, world_size: int = 1, even: bool = False
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is outside 0..{world_size - 1}")
        self.size, self.shuffle, self.seed, self.rank, self.num_replicas = size, shuffle, seed, rank, world_size
        self.even = even
        self.epoch = 0
        self.first = 0  # samples of this rank to leave out at the start of the next pass, set when resuming

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next pass yields. Lightning calls this at the start of every epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[SampleKey]:
        if self.shuffle:
            state = np.random.SeedSequence((self.seed, self.epoch)).generate_state(1, np.uint64)
            generator = torch.Generator().manual_seed(int(state[0]))
            indices = torch.randperm(self.size, generator=generator)
        else:
            indices = torch.arange(self.size)
        share = indices[self.rank :: self.num_replicas][: len(self)]
        epoch = self.epoch
        for index in share[self.first :].tolist():
            yield SampleKey(epoch, index)

    def __len__(self) -> int:
        if self.even:
            return self.size // self.num_replicas
        return (self.size - self.rank + self.num_replicas - 1) // self.num_replicas


class EvaluationOrder(EpochOrder):
    """Yields every sample once, in ascending order, and then keys of no sample, so that all ranks and batches are full.

    Ranks with different numbers of batches don't go together with DDP, which sends buffers around before each forward,
    in evaluation too. A key of no sample has the index `size`; the dataset makes of it what counts for nothing.

    Args:
        size: number of samples in the dataset.
        rank, world_size: as for `EpochOrder`.
        batch_size: every rank's count is a multiple of it, so that shapes stay the same.
    """

    def __init__(self, size: int, *, rank: int = 0, world_size: int = 1, batch_size: int = 1) -> None:
        super().__init__(size, shuffle=False, seed=0, rank=rank, world_size=world_size)
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[SampleKey]:
        own = list(super().__iter__())
        yield from own
        yield from [SampleKey(self.epoch, self.size)] * (len(self) - self.first - len(own))

    def __len__(self) -> int:
        largest_share = -(-self.size // self.num_replicas)
        return -(-largest_share // self.batch_size) * self.batch_size


class Resumable:
    """A loader whose position is part of the checkpoint.

    Lightning stores `state_dict()` of a training loader that has one and gives it back before the first batch after a
    resume. The position counts batches handed out, not batches that are prepared. A pass calls `begin_pass` first, and
    adds to `batches_served` before it hands out a batch.
    """

    order: EpochOrder
    batch_size: int | None
    batches_served = 0
    _resume: dict[str, int] | None = None

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of its batches handed out."""
        return {"epoch": self.order.epoch, "batches": self.batches_served}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Make the next pass over that same epoch begin after the batches already handed out."""
        self._resume = dict(state)

    def begin_pass(self) -> None:
        """Have the order begin where the epoch was left, or at its start."""
        resume, self._resume = self._resume, None
        done = resume["batches"] if resume and resume["epoch"] == self.order.epoch else 0
        self.batches_served = done
        self.order.first = done * (self.batch_size or 1)


class ResumableLoader(Resumable, DataLoader[Any]):
    """A DataLoader whose position is part of the checkpoint.

    Args:
        dataset: map-style, indexed by `SampleKey`.
        order: the sampler.
        options: DataLoader's own arguments; `shuffle`, `sampler` and `batch_sampler` are settled by `order`.
    """

    def __init__(self, dataset: Dataset[Any], order: EpochOrder, **options: Any) -> None:
        # With a generator of its own the loader draws its workers' seeds from there, and making an iterator
        # leaves the global random state alone: a resumed run makes one more iterator than an unbroken one.
        options.setdefault("generator", torch.Generator().manual_seed(order.seed % 2**63))
        super().__init__(dataset, sampler=order, **options)
        self.order = order

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.begin_pass()
        batches = super().__iter__()
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except FasttrainError as error:
                raise _without_traceback(error) from None
            self.batches_served += 1
            yield batch


def _without_traceback(error: FasttrainError) -> FasttrainError:
    """Return a user's error as it was raised: torch puts a worker process's whole traceback before its sentence."""
    text = str(error)
    return type(error)(text.rsplit(f"{type(error).__name__}: ", 1)[-1].strip()) if text.startswith("Caught ") else error
