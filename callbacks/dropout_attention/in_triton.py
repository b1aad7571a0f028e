"""How the kernels are laid over the blocks, and launched. Nothing waits for the GPU."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttrain.callbacks.dropout_attention.backward_kernels import key_kernel, query_kernel
from fasttrain.callbacks.dropout_attention.forward_kernel import forward_kernel
from fasttrain.callbacks.dropout_attention.mask import Words, threshold
from fasttrain.callbacks.dropout_attention.tiling import Tile, Way

LIMITED_HEAD_SIZE = 64
"""Up to which a limit of registers is heeded."""


class Kept(NamedTuple):
    """What the backward needs of the forward."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    lse: Tensor
    words: Words | None
    by_query: Tensor
    by_key: Tensor


def forward(
    query: Tensor, key: Tensor, value: Tensor, words: Words | None, blocks: Tensor, way: Way
) -> tuple[Tensor, Tensor]:
    """Return the output, dense like the query, and float32 (heads, tokens) of logarithms of sums.

    Args:
        query, key, value: (tokens, heads, head size), with a unit stride in the last.
        words: see `mask`; None if nothing is dropped.
        blocks: for the forward's tile.
    """
    tokens, heads, size = query.shape
    output = torch.empty(tokens, heads, size, dtype=query.dtype, device=query.device)
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=query.device)
    by_query, by_key = (lse, lse) if words is None else words
    with torch.cuda.device_of(query):
        forward_kernel[(len(blocks) * heads,)](
            query, key, value, output, lse, blocks, by_query, by_key, *_strides(query, key, value), tokens,
            threshold(way.dropout), way.scale * math.log2(math.e), 1 / (1 - way.dropout),
            **_constants(query, way, way.tiling.forward), **_twice(way.tiling.forward),
        )  # fmt: skip
    return output, lse


def backward(kept: Kept, upstream: Tensor, way: Way) -> Tensor:
    """Return the gradients of query, key and value, one buffer (tokens, 3, heads, head size) in their dtype.

    `upstream` is the output's gradient, with a unit stride in the last dimension.
    """
    query, key, value, output, lse, words, blocks_of_queries, blocks_of_keys = kept
    tokens, heads, size = query.shape
    gradients = torch.empty(tokens, 3, heads, size, dtype=query.dtype, device=query.device)
    by_query, by_key, by_value = gradients.unbind(1)
    of_queries = torch.empty(heads, tokens, 4, dtype=torch.int32, device=query.device)
    query_words, key_words = (lse, lse) if words is None else words
    strides = _strides(query, key, value, upstream, by_query)
    limit, scale, kept_share = threshold(way.dropout), way.scale * math.log2(math.e), 1 - way.dropout
    with torch.cuda.device_of(query):
        query_kernel[(len(blocks_of_queries) * heads,)](
            query, key, value, output, upstream, lse, blocks_of_queries, query_words, key_words, by_query, of_queries,
            *strides, tokens, limit, scale, way.scale / kept_share, kept_share,
            **_constants(query, way, way.tiling.by_query), **_twice(way.tiling.by_query),
        )  # fmt: skip
        key_kernel[(len(blocks_of_keys) * heads,)](
            query, key, value, upstream, of_queries, blocks_of_keys, key_words, by_key, by_value,
            *strides, tokens, limit, scale, way.scale / kept_share, 1 / kept_share,
            **_constants(query, way, way.tiling.by_key),
        )  # fmt: skip
    return gradients


def _strides(*parts: Tensor) -> tuple[int, ...]:
    return tuple(stride for part in parts for stride in part.stride()[:2])


def _constants(query: Tensor, way: Way, tile: Tile) -> dict[str, Any]:
    small = query.shape[2] <= LIMITED_HEAD_SIZE and query.element_size() == 2
    options = {"maxnreg": tile.registers} if small and tile.registers is not None else {}
    return {
        "HEADS": query.shape[1], "HEAD_SIZE": query.shape[2], "QUERIES": tile.queries, "KEYS": tile.keys,
        "STAGES": tile.stages, "DROPOUT": way.dropout > 0, "CAUSAL": way.causal,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32", "num_warps": tile.warps, **options,
    }  # fmt: skip


def _twice(tile: Tile) -> dict[str, bool]:
    return {"TWICE": tile.keys * 2 < tile.warps * 32}
