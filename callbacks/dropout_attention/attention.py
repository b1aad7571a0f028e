"""The body: attention within packed sequences, with dropout. Works in any loop, on one GPU's tensors."""

from typing import Any

import torch
from torch import Tensor

from fasttrain.callbacks.dropout_attention.blocks import Blocks
from fasttrain.callbacks.dropout_attention.mask import Words, draw_words, threshold
from fasttrain.callbacks.dropout_attention.tiling import TILING, Tiling, Way
from fasttrain.errors import OptimizationError

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_SIZES = (16, 32, 64, 128)


def dropout_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Blocks,
    *,
    dropout: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
    words: Words | None = None,
    tiling: Tiling = TILING,
) -> Tensor:
    """Return dropout(softmax(Q K^T * scale)) V within each sequence, (tokens, heads, head size), dense.

    Products are of the inputs' dtype with float32 sums; the rest is float32.

    Args:
        query, key, value: (tokens, heads, head size), float16, bfloat16 or float32, of one dtype and device; they may
            be views of one matrix, if their last dimension is dense. Their gradients are views of one
            (tokens, 3, heads, head size), in this order.
        blocks: what `make_blocks` has made of the offsets, with the same tiling.
        dropout: probability with which a weight is left out, below 1.
        causal: a query looks at no later keys.
        scale: of the logits, positive; None is 1 / sqrt(head size).
        words: decide about the mask, see `mask`; by default they are drawn anew for each call, and each replay.

    Raises:
        OptimizationError: where shapes, dtypes or numbers don't fit; in the backward, if it is to be differentiated
            again.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    _check(query, key, value, dropout, scale)
    query, key, value = (_dense(part) for part in (query, key, value))
    if not dropout:
        words = None
    elif words is None:
        words = draw_words(query.shape[1], len(query), query.device)
    found: Tensor = _DropoutAttention.apply(query, key, value, words, blocks, Way(dropout, causal, scale, tiling))
    return found


class _DropoutAttention(torch.autograd.Function):
    """The same for autograd."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, words: Words | None, blocks: Blocks, way: Way
    ) -> Tensor:
        from fasttrain.callbacks.dropout_attention import in_triton  # where Triton isn't installed it can't be imported

        output, lse = in_triton.forward(query, key, value, words, blocks.forward, way)
        ctx.save_for_backward(query, key, value, output, lse, *(words or (None, None)), blocks.by_query, blocks.by_key)
        ctx.way = way
        return output

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise OptimizationError(
                "dropout_attention: a gradient that can be differentiated again was asked for (create_graph=True), and "
                "these kernels have no second derivative; packed_attention(backend='dense') has."
            )
        from fasttrain.callbacks.dropout_attention import in_triton

        query, key, value, output, lse, by_query, by_key, queries, keys = ctx.saved_tensors
        words = None if by_query is None else Words(by_query, by_key)
        gradients = in_triton.backward(
            in_triton.Kept(query, key, value, output, lse, words, queries, keys), _dense(upstream), ctx.way
        )
        return *gradients.unbind(1), None, None, None


def can_take(query: Tensor) -> bool:
    """Whether there is a kernel for this dtype and head size."""
    return query.dtype in DTYPES and query.shape[-1] in HEAD_SIZES


def _dense(part: Tensor) -> Tensor:
    return part if part.stride(-1) == 1 else part.contiguous()


def _check(query: Tensor, key: Tensor, value: Tensor, dropout: float, scale: float) -> None:
    from fasttrain.callbacks.dropout_attention.forward_kernel import INTERPRETED

    for name, part in (("query", query), ("key", key), ("value", value)):
        if part.dim() != 3 or not can_take(part):
            raise OptimizationError(
                f"dropout_attention: {name} is (tokens, heads, head size) of float16, bfloat16 or float32, with a head "
                f"size of {', '.join(map(str, HEAD_SIZES))}; this is {part.dtype} of {tuple(part.shape)}. "
                "packed_attention's other backends take others."
            )
        if part.shape != query.shape or part.dtype != query.dtype or part.device != query.device:
            raise OptimizationError(
                f"dropout_attention: query, key and value have one shape, dtype and device; the query is {query.dtype} "
                f"of {tuple(query.shape)} on {query.device}, the {name} {part.dtype} of {tuple(part.shape)} on "
                f"{part.device}."
            )
    if query.device.type != "cuda" and not INTERPRETED.value:
        raise OptimizationError(
            f"dropout_attention: its kernels are Triton's, for NVIDIA GPUs; these tensors are on {query.device}. "
            "packed_attention(backend='dense') takes any device."
        )
    if not 0 <= dropout < 1 or threshold(dropout) >= 2**31:
        raise OptimizationError(
            f"dropout_attention: dropout is the share of weights that is left out, from 0 to less than 1; it is "
            f"{dropout}."
        )
    if not scale > 0:
        raise OptimizationError(
            f"dropout_attention: the scale is positive, as the kernels take each row's largest logit before it; it is "
            f"{scale}. Scale the query instead."
        )
