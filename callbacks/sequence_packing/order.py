"""The order in which packed rows are seen: dealt anew each epoch, split over ranks, and resumable."""

from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from fasttrain.callbacks.sequence_packing.histogram import length_of
from fasttrain.callbacks.sequence_packing.plan import Members, PackingPlan, deal, whole_batches
from fasttrain.callbacks.sequence_packing.rows import IGNORED, RowFormat, collate_rows, pack_row
from fasttrain.callbacks.sequence_packing.samples import Samples
from fasttrain.errors import DataError
from fasttrain.order import EpochOrder, ResumableLoader

CHUNK = 4096


class RowKey(NamedTuple):
    """One visit of one row: the epoch it happens in and the indices of the sequences in it."""

    epoch: int
    members: tuple[int, ...]


class PackedOrder(EpochOrder):
    """Yields a rank's rows of an epoch as `RowKey`s: the same number on every rank, in full batches.

    A key holds all that a worker has to know, so that the arrays of the plan exist in this process only.

    Args:
        plan: of these lengths' histogram.
        lengths: (sequences,) tokens of each sequence.
        rows_per_batch: rows in a rank's batch.
        shuffle: deal sequences anew each epoch, and shuffle the rows; equal on all ranks.
        index: (sequences,) what a sequence's number stands for in the data set, where some are left out.
    """

    def __init__(
        self,
        plan: PackingPlan,
        lengths: NDArray[Any],
        *,
        rows_per_batch: int,
        seed: int,
        shuffle: bool = True,
        rank: int = 0,
        world_size: int = 1,
        index: NDArray[np.int64] | None = None,
    ) -> None:
        rows = -(-plan.rows // (rows_per_batch * world_size)) * rows_per_batch * world_size
        super().__init__(rows, shuffle=shuffle, seed=seed, rank=rank, world_size=world_size, even=True)
        self.plan, self.lengths, self.rows_per_batch, self.index = plan, lengths, rows_per_batch, index
        self._of_epoch = lru_cache(maxsize=1)(self._deal)

    def members(self, epoch: int) -> Members:
        """Return the sequences of all ranks' rows in an epoch, in the order in which the rows are seen."""
        return self._of_epoch(epoch if self.shuffle else 0)

    def sequences_by_batch(self) -> list[int]:
        """Return how many sequences are in each batch of the current epoch, all ranks' together."""
        by_row = (self.members(self.epoch) >= 0).sum(axis=1)
        by_batch: list[int] = by_row.reshape(-1, self.rows_per_batch * self.num_replicas).sum(axis=1).tolist()
        return by_batch

    def __iter__(self) -> Iterator[RowKey]:  # type: ignore[override]
        share = self.members(self.epoch)[self.rank :: self.num_replicas]
        epoch = self.epoch
        for start in range(self.first, len(share), CHUNK):  # a list of all would take a gigabyte
            for row in share[start : min(start + CHUNK, len(share))].tolist():
                yield RowKey(epoch, tuple(self.named(number) for number in row if number >= 0))

    def named(self, number: int) -> int:
        """Return the index in the data set of one of the plan's sequences."""
        return number if self.index is None else int(self.index[number])

    def _deal(self, epoch: int) -> Members:
        members = deal(self.plan, self.lengths, seed=self.seed, epoch=epoch, shuffle=self.shuffle)
        return whole_batches(members, self.rows_per_batch * self.num_replicas)


class PackedDataset(Dataset[Any]):
    """Rows made from samples when they are asked for by `RowKey`.

    Args:
        samples: of a user's loader.
        form: what rows hold.
        lengths: (samples,) tokens that each sample had when the plan was made.
    """

    def __init__(self, samples: Samples, form: RowFormat, lengths: NDArray[Any]) -> None:
        self.samples, self.form, self.lengths = samples, form, lengths

    def __getitem__(self, key: RowKey) -> dict[str, Tensor]:
        return pack_row([self._sample(key.epoch, index) for index in key.members], self.form)

    def _sample(self, epoch: int, index: int) -> Any:
        sample = self.samples.visit(epoch, index)
        found = length_of(sample, self.form.length_key, index)
        if found != self.lengths[index]:
            raise DataError(
                f"sample {index} has {found} tokens, but had {self.lengths[index]} when the plan was made: a packed "
                "data set gives each sample the same length every time. Where lengths come from a file, make it anew."
            )
        return self.form.shortened(sample) if found > self.form.max_length else sample


class PackedLoader(ResumableLoader):
    """Batches of packed rows, which know what their losses are divided by, and how many sequences were seen.

    A batch gets a dict `totals`: for each of its targets (what is filled up with -100), for `sequences` and for
    `next_tokens` of causal models, how many there are in an optimizer step, divided by `accumulate`, the batches of
    such a step; float32 tensors without dimensions. A sum of losses over the targets divided by it, and averaged by
    the accumulation, is the mean over all targets of the step.

    Args:
        form: of the rows.
        static: see `collate_rows`.
        accumulate: batches of an optimizer step.
    """

    order: PackedOrder

    def __init__(
        self,
        dataset: Dataset[Any],
        order: PackedOrder,
        form: RowFormat,
        *,
        static: bool = True,
        accumulate: int = 1,
        **options: Any,
    ) -> None:
        collate = partial(collate_rows, form=form, static=static)
        super().__init__(dataset, order, batch_size=order.rows_per_batch, collate_fn=collate, **options)
        self.accumulate = accumulate
        self.sequences_seen = 0  # in all batches handed out since training began, over all ranks
        self._target_names = tuple(
            name for name, fill in {**form.tokens, **form.targets, **form.lists}.items() if fill == IGNORED
        )

    def state_dict(self) -> dict[str, int]:
        """Return the position, and the number of sequences seen."""
        return {**super().state_dict(), "sequences": self.sequences_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        super().load_state_dict(state)
        self.sequences_seen = state.get("sequences", 0)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = super().__iter__()
        sequences: list[int] | None = None
        while window := list(islice(batches, self.accumulate)):
            # The loader has counted the whole window as handed out; it is, batch by batch.
            handed_out = self.batches_served - len(window)
            sequences = self.order.sequences_by_batch() if sequences is None else sequences
            totals = self._totals(window, self.accumulate)
            for batch in window:
                handed_out += 1
                self.batches_served = handed_out
                self.sequences_seen += sequences[handed_out - 1]
                yield {**batch, "totals": dict(totals)}

    def as_batch(self, rows: list[dict[str, Tensor]]) -> dict[str, Any]:
        """Return rows as a batch of this loader's, by itself an optimizer step."""
        batch: dict[str, Tensor] = self.collate_fn(rows)
        return {**batch, "totals": self._totals([batch], 1)}

    def _totals(self, window: list[dict[str, Tensor]], accumulate: int) -> dict[str, Tensor]:
        counts = {name: sum(int((batch[name] != IGNORED).sum()) for batch in window) for name in self._target_names}
        counts["sequences"] = sum(int(batch["num_sequences"]) for batch in window)
        # A sequence's last token has no next one to tell: see `losses.next_tokens`.
        counts["next_tokens"] = sum(int(batch["sequence_lengths"].sum()) for batch in window) - counts["sequences"]
        # An epoch's last window may be shorter, and the Trainer divides its losses by `accumulate` all the same.
        return {name: torch.tensor(count / accumulate, dtype=torch.float32) for name, count in counts.items()}
