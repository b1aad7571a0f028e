"""Attention within the sequences of packed rows, by variable-length kernels on a GPU and a dense mask elsewhere."""

import inspect
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fasttrain.callbacks.dropout_attention import Blocks, dropout_attention, make_blocks
from fasttrain.errors import MissingDependencyError

# torch has it from 2.10 on; read here, since torch.compile can't look at signatures.
varlen: Any = import_module("torch.nn.attention.varlen") if find_spec("torch.nn.attention.varlen") else None
VARLEN_OPTIONS = frozenset(inspect.signature(varlen.varlen_attn).parameters) if varlen else frozenset()
AttentionBackend = Literal["auto", "dense", "varlen", "flash_attn", "cudnn", "triton"]
AttentionMask = Tensor | Blocks


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    *,
    dropout: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
    rows: int = 1,
    backend: AttentionBackend = "auto",
    mask: AttentionMask | None = None,
) -> Tensor:
    """Return softmax(Q K^T * scale) V within each sequence, (tokens, heads, head size).

    Args:
        query, key, value: (tokens, heads, head size), one sequence behind another, as a batch of rows flattened.
        cu_seqlens: (sequences + 1,) int32: where each begins, and the end, which is the number of tokens. Sequences
            without tokens may be anywhere, so its length can be the same for every batch.
        max_length: tokens of the longest sequence, or more; a number of the host's.
        dropout: probability with which an attention weight is left out.
        scale: None is 1 / sqrt(head size).
        rows: number of rows of equal length that no sequence goes beyond, as those of `collate_rows`: the dense mask is
            made row by row. Other backends have no use for it.
        backend: `auto` is a variable-length kernel for float16 and bfloat16 on an NVIDIA GPU: torch's, or flash-attn's
            where torch has none; else `dense`, which any device and dtype can do, at the cost of a weight for each pair
            of tokens in a row. `cudnn` is cuDNN's attention over rows with a bias for each pair, for float16 and
            bfloat16 on an NVIDIA GPU: more arithmetic, by kernels made for Hopper. `triton` is `dropout_attention`,
            for an NVIDIA GPU; under torch.compile it is torch's operator.
        mask: what `mask_for` has made of these offsets, where several layers share it; `dense`, `cudnn` and `triton`
            make it anew otherwise, and other backends have no use for it.

    Nothing waits for the GPU, so a step with it can be captured as a graph.

    Raises:
        MissingDependencyError: flash-attn is asked for and is not installed.
    """
    if backend == "auto":
        backend = attention_backend(query.device, query.dtype)
    if backend == "triton" and not torch.compiler.is_compiling():
        return _triton(query, key, value, cu_seqlens, mask, dropout, causal, scale)
    if backend in ("dense", "cudnn"):
        if mask is None:
            mask = mask_for(backend, cu_seqlens, rows, len(query) // rows, query.dtype, causal=causal)
        assert isinstance(mask, Tensor)
        attend = _dense if backend == "dense" else _cudnn
        return attend(query, key, value, mask, dropout, scale)
    if backend == "flash_attn":
        return _flash_attn(query, key, value, cu_seqlens, max_length, dropout, causal, scale)
    if dropout or not VARLEN_OPTIONS:
        return _operator(query, key, value, cu_seqlens, max_length, dropout, causal, scale)
    return _varlen(query, key, value, cu_seqlens, max_length, causal, scale)


def mask_for(
    backend: AttentionBackend, cu_seqlens: Tensor, rows: int, length: int, dtype: torch.dtype, *, causal: bool = False
) -> AttentionMask | None:
    """Return what `packed_attention` takes as a mask; None for backends without one.

    It is (rows, 1, length, length), of bool for `dense`; for `cudnn` of the products' dtype, 0 and minus infinity, to
    be added to their logits. For `triton` it is which part of which sequence each program takes.
    """
    if backend == "triton":
        return make_blocks(cu_seqlens, rows * length)
    if backend not in ("dense", "cudnn"):
        return None
    mask = block_diagonal_rows(cu_seqlens, rows, length, causal=causal)
    if backend == "dense":
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


def block_diagonal(cu_seqlens: Tensor, tokens: int, *, causal: bool = False) -> Tensor:
    """Return which token may look at which, (tokens, tokens) bool: those of its own sequence, itself among them.

    Args:
        cu_seqlens: (sequences + 1,) offsets; tokens behind the last of them are one more sequence.
        causal: only those before it, too.
    """
    return mask_of_rows(_sequence_of(cu_seqlens, tokens)[None], causal=causal)[0, 0]


def block_diagonal_rows(cu_seqlens: Tensor, rows: int, length: int, *, causal: bool = False) -> Tensor:
    """Return it for rows of equal length that no sequence goes beyond, (rows, 1, length, length) bool."""
    return mask_of_rows(_sequence_of(cu_seqlens, rows * length).view(rows, length), causal=causal)


def mask_of_rows(sequence_ids: Tensor, *, causal: bool = False) -> Tensor:
    """Return the same row by row, (rows, 1, max_length, max_length) bool, for models whose attention takes a mask.

    Args:
        sequence_ids: (rows, max_length), 0 for padding, which looks at padding alone.
    """
    mask = sequence_ids[:, :, None] == sequence_ids[:, None]
    if causal:
        place = torch.arange(sequence_ids.shape[1], device=sequence_ids.device)
        mask = mask & (place[:, None] >= place)
    return mask[:, None]


def _sequence_of(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Return which of the sequences each token is in."""
    place = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens.contiguous(), place, right=True)


def attention_backend(device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """Return what `auto` is for tensors of a device and a dtype."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return "dense"
    if torch.version.hip is None:
        return "varlen"
    return "flash_attn" if find_spec("flash_attn") is not None else "dense"


def _dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float, scale: float | None) -> Tensor:
    q, k, v = (part.unflatten(0, (len(mask), -1)).transpose(1, 2) for part in (query, key, value))
    found = scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
    return found.transpose(1, 2).flatten(0, 1)


def _cudnn(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, dropout: float, scale: float | None) -> Tensor:
    q, k, v = (part.unflatten(0, (len(bias), -1)).transpose(1, 2) for part in (query, key, value))
    keep = torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value))
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, bias, keep, dropout, False, False, scale=scale)
    output: Tensor = found[0].transpose(1, 2).flatten(0, 1)
    return output


def _triton(
    query: Tensor, key: Tensor, value: Tensor, cu: Tensor, mask: AttentionMask | None, dropout: float, causal: bool,
    scale: float | None,
) -> Tensor:  # fmt: skip
    blocks = mask if isinstance(mask, Blocks) else make_blocks(cu, len(query))
    return dropout_attention(query, key, value, blocks, dropout=dropout, causal=causal, scale=scale)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, cu: Tensor, most: int, causal: bool, scale: float | None
) -> Tensor:
    # Its options differ between versions of torch.
    options: dict[str, Any] = {}
    if "scale" in VARLEN_OPTIONS:
        options["scale"] = scale
    elif scale is not None:
        query = query * (scale * query.shape[-1] ** 0.5)
    if causal and "is_causal" in VARLEN_OPTIONS:
        options["is_causal"] = True
    elif causal:
        options["window_size"] = (-1, 0)
    found: Tensor = varlen.varlen_attn(query, key, value, cu, cu, most, most, **options)
    return found


def _operator(
    query: Tensor, key: Tensor, value: Tensor, cu: Tensor, most: int, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    # torch's public variable-length attention has no dropout; the operator below it has, with its derivative.
    found = torch.ops.aten._flash_attention_forward(
        query, key, value, cu, cu, most, most, dropout, causal, False, scale=scale
    )
    output: Tensor = found[0]
    return output


def _flash_attn(
    query: Tensor, key: Tensor, value: Tensor, cu: Tensor, most: int, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    if find_spec("flash_attn") is None:
        raise MissingDependencyError(
            "packed_attention(backend='flash_attn') needs the package flash-attn; `pip install flash-attn`, or leave "
            "the choice to backend='auto', which takes torch's own kernel."
        )
    attend: Any = import_module("flash_attn").flash_attn_varlen_func
    output: Tensor = attend(
        query, key, value, cu, cu, most, most, dropout_p=dropout, softmax_scale=scale, causal=causal
    )
    return output
