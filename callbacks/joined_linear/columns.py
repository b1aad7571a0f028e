"""A matrix's columns taken apart, with a backward that copies nothing where gradients lie as the columns did."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def split_columns(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Return x.split(sizes, dim=-1).

    torch.split's backward writes the gradients one beside another, into a new matrix. Here that is left out where they
    already are views of one, as `dropout_attention` makes them.
    """
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and x.requires_grad):
        parts: tuple[Tensor, ...] = x.split(list(sizes), dim=-1)
        return parts
    found: tuple[Tensor, ...] = _SplitColumns.apply(x, list(sizes))
    return found


def side_by_side(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the matrix that these are the columns of, in their order and without others; None if there is none."""
    first, widths = parts[0], [part.shape[-1] for part in parts]
    whole = torch.Size([*first.shape[:-1], sum(widths)])
    strides = torch.empty(whole, device="meta").stride()
    place = first.storage_offset()
    for part, width in zip(parts, widths, strict=True):
        same = part.dtype == first.dtype and part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.storage_offset() != place or part.stride() != strides:
            return None
        place += width
    return first.as_strided(whole, strides)


class _SplitColumns(torch.autograd.Function):
    """The same for autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = x.split(sizes, dim=-1)
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        joined = None if torch.is_grad_enabled() else side_by_side(gradients)
        return torch.cat(gradients, dim=-1) if joined is None else joined, None
