"""Batches without padding, and ranks with about as many tokens each: what there is in place of packed rows.

MLPerf v2.0's submissions gather the batches of all ranks, sort them by length, and deal them out again
(`--exchange_padding`). Here the order is known before any sample is read, so only places in it are exchanged: every
rank works out the same deal, and nothing is sent.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fasttrain.callbacks.sequence_packing import collate_rows, format_of, pack_row
from fasttrain.order import EpochOrder, SampleKey
from fasttrain.recipes.bert.sequences import LISTS, POSITIONS

TOKENS_MULTIPLE_OF = 64
"""As tensor cores like it, FP8's most; at most so many tokens less one are padding, behind the last sequence."""


def unpadded(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return samples as a batch of one row with one sequence behind another, as long as they are together.

    Shapes follow the samples: tokens (1, all of them, filled up to a multiple of 64), targets (sequences,).
    """
    tokens = sum(len(sample["input_ids"]) for sample in samples)
    form = format_of(
        samples[0],
        length_key="input_ids",
        max_length=-(-tokens // TOKENS_MULTIPLE_OF) * TOKENS_MULTIPLE_OF,
        max_sequences=len(samples),
        lists=LISTS,
        positions=POSITIONS,
        list_capacity=sum(len(sample[LISTS[0]]) for sample in samples),
    )
    return collate_rows([pack_row(samples, form)], form, static=False)


class ExchangedOrder(EpochOrder):
    """`EpochOrder`, with the samples of each global batch dealt to the ranks by length.

    Every global batch has the samples that it has without, so a step's gradient is the same. Each rank gets one of
    every `world_size` samples in descending length, and the turns go to and fro.

    Args:
        lengths: (samples,) tokens of each.
        batch_size: of a rank.
        options: of `EpochOrder`.
    """

    def __init__(self, lengths: NDArray[Any], batch_size: int, **options: Any) -> None:
        super().__init__(len(lengths), **options)
        self.lengths, self.batch_size = lengths, batch_size

    def __iter__(self) -> Iterator[SampleKey]:
        shares = [list(self._share(rank)) for rank in range(self.num_replicas)]
        for begin in range(0, len(self), self.batch_size):
            together = [key for share in shares for key in share[begin : begin + self.batch_size]]
            together.sort(key=lambda key: (-int(self.lengths[key.index]), key.index))
            dealt = [together[at] for at in _turns(len(together), self.num_replicas, self.rank)]
            yield from dealt[max(0, self.first - begin) :]

    def _share(self, rank: int) -> Iterator[SampleKey]:
        of_rank = EpochOrder(
            self.size, shuffle=self.shuffle, seed=self.seed, rank=rank, world_size=self.num_replicas, even=self.even
        )
        of_rank.set_epoch(self.epoch)
        return iter(of_rank)


def _turns(count: int, ranks: int, rank: int) -> NDArray[np.int64]:
    """Return which of `count` sorted samples are a rank's: 0 1 2, 2 1 0, 0 1 2 and so on."""
    rounds = np.arange(-(-count // ranks))
    places = rounds * ranks + np.where(rounds % 2 == 0, rank, ranks - 1 - rank)
    return places[places < count]
