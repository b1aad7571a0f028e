"""The obvious version: each sequence by itself."""

import torch
from torch import Tensor

TOLERANCE = {
    torch.float64: 1e-10,  # sums of the same numbers in another order
    torch.float32: 1e-5,
    torch.float16: 2e-3,  # of outputs of size 1: weights are rounded to 11 bits before they multiply the values
    torch.bfloat16: 2e-2,  # to 8 bits
}


def attention_reference(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], *, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Return attention computed sequence by sequence, (tokens, heads, head size).

    Args:
        query, key, value: (tokens, heads, head size), one sequence behind another.
        lengths: tokens of each sequence; they add up to all tokens.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    outputs = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        weights = torch.einsum("qhd,khd->hqk", q, k) * scale
        if causal:
            weights = weights.masked_fill(torch.ones_like(weights[0], dtype=torch.bool).triu(1), -torch.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", weights.softmax(dim=-1), v))
    return torch.cat(outputs)


def greedy_rows(lengths: list[int], max_length: int, max_sequences: int) -> list[list[int]]:
    """Return rows of indices by best-fit-decreasing, sequence by sequence: what a plan must equal."""
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [
            row for row in rows
            if len(row) < max_sequences and sum(lengths[i] for i in row) + lengths[index] <= max_length
        ]  # fmt: skip
        if fitting:
            max(fitting, key=lambda row: sum(lengths[i] for i in row)).append(index)
        else:
            rows.append([index])
    return rows
