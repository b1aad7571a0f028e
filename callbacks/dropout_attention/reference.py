"""The obvious version: one sequence after another, all of its weights in memory. Tests and bench compare with it."""

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest difference, as a share of the largest element: float32 sums in another order; in 16 bits weights and the
gradients of logits are rounded before products, 2^-11 and 2^-8, as results are."""


def attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], *, dropout: float = 0.0, keep: Tensor | None = None,
    causal: bool = False, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Return attention within sequences of these lengths, (tokens, heads, head size), in the inputs' dtype.

    Args:
        query, key, value: (tokens, heads, head size).
        keep: (heads, tokens, tokens) bool, which weights dropout keeps; None for all.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    found, begin = [], 0
    for length in lengths:
        here = slice(begin, begin + length)
        q, k, v = (part[here].transpose(0, 1) for part in (query, key, value))
        logits = q @ k.transpose(1, 2) * scale
        if causal:
            logits = logits.masked_fill(logits.new_ones(length, length).triu(1).bool(), -torch.inf)
        weights = logits.softmax(-1)
        if keep is not None:
            weights = weights * keep[:, here, here] / (1 - dropout)
        found.append((weights @ v).transpose(0, 1))
        begin += length
    return torch.cat(found)
