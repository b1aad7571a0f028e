"""The sequences' blocks: which part of which sequence a program takes, found on the device from the offsets."""

from typing import NamedTuple

import torch
from torch import Tensor

from fasttrain.callbacks.dropout_attention.tiling import TILING, Tiling


class Blocks(NamedTuple):
    """Those of each kernel, see `blocks_of`."""

    forward: Tensor
    by_query: Tensor
    by_key: Tensor


def make_blocks(cu_seqlens: Tensor, tokens: int, tiling: Tiling = TILING) -> Blocks:
    """Return the blocks of a batch, which all layers may share."""
    sizes = tiling.forward.queries, tiling.by_query.queries, tiling.by_key.keys
    made = {size: blocks_of(cu_seqlens, tokens, size) for size in set(sizes)}
    return Blocks(*(made[size] for size in sizes))


def blocks_of(cu_seqlens: Tensor, tokens: int, size: int) -> Tensor:
    """Return int32 (capacity, 3): where a block's sequence begins, its length, and the block's first place in it.

    Long sequences come first, so that what a GPU works on last is short. The capacity depends on shapes alone, and
    nothing waits for the device; entries in excess have length 0.

    Args:
        cu_seqlens: (sequences + 1,) offsets into so many tokens; sequences without any may be anywhere.
        size: of a block, in tokens; the last one of a sequence may have fewer.
    """
    begins, lengths = cu_seqlens[:-1], cu_seqlens.diff()
    lengths, order = lengths.sort(descending=True, stable=True)
    ends = ((lengths + (size - 1)) // size).cumsum(0)
    place = torch.arange(capacity(len(lengths), tokens, size), device=ends.device)
    which = torch.searchsorted(ends, place, right=True)
    there = which < len(lengths)
    which = which.clamp(max=len(lengths) - 1)
    before = torch.where(which > 0, ends[which - 1], 0)
    made = torch.stack([begins[order][which], lengths[which], (place - before) * size], dim=1)
    return torch.where(there[:, None], made, 0).to(torch.int32)


def capacity(sequences: int, tokens: int, size: int) -> int:
    """Return how many blocks there are at most: every sequence may end in one that is not full."""
    return min(tokens // size + sequences, tokens)
