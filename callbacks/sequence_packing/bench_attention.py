"""Attention with dropout as in BERT-large's training: 56 packed rows of 512, forward and backward, by each backend."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from fasttrain.callbacks.joined_linear.columns import split_columns
from fasttrain.callbacks.sequence_packing.attention import AttentionBackend, mask_for, packed_attention
from fasttrain.floor import H200_FLOP_PER_SECOND
from fasttrain.measure import Row, captured, make_row, sample_ms

ROWS, LENGTH, HEADS, HEAD_SIZE = 56, 512, 16, 64
DROPOUT = 0.1
PRODUCTS = 7  # 2 forward and 5 backward, of as many operations each
BACKENDS: dict[str, AttentionBackend] = {"plain": "varlen", "cudnn": "cudnn", "ours": "triton"}
NOTES = {
    "plain": "torch's FlashAttention-2 operator",
    "cudnn": "cuDNN's attention over rows with a bias for each pair",
    "ours": "dropout_attention",
}


def attention_b56() -> Iterator[Row]:
    """Yield milliseconds of forward, and of forward and backward up to the joined projections' gradient."""
    lengths = paired_lengths(ROWS)
    ends = torch.tensor(lengths, device="cuda").cumsum(0)
    cu_seqlens = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
    width = HEADS * HEAD_SIZE
    joined = torch.randn(ROWS * LENGTH, 3 * width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(ROWS * LENGTH, HEADS, HEAD_SIZE, device="cuda", dtype=torch.bfloat16)
    pairs = sum(length**2 for length in lengths)
    for variant, backend in BACKENDS.items():
        attend = _attention(joined, cu_seqlens, backend)

        def step(attend: Callable[[], Tensor] = attend) -> None:
            torch.autograd.grad(attend(), joined, upstream)

        note = f"bf16, dropout {DROPOUT}, {len(lengths)} sequences, replays of a CUDA graph; {NOTES[variant]}"
        for metric, call in (("fwd_ms", attend), ("fwd_bwd_ms", step)):
            times = sample_ms(captured(call), "cuda", warmup=5, repeats=30)
            yield make_row("sequence_packing", "attention_b56", variant, metric, "ms", times, note)
    for metric, products in (("fwd_ms", 2), ("fwd_bwd_ms", PRODUCTS)):
        floor = products * 2 * pairs * width / H200_FLOP_PER_SECOND * 1e3
        note = f"{products} products over {pairs:,} pairs of tokens and {width} columns, at 790 TFLOP/s"
        yield make_row("sequence_packing", "attention_b56", "floor", metric, "ms", [floor], note)


def paired_lengths(rows: int, seed: int = 0) -> list[int]:
    """Return lengths that fill rows of 512: a fourth of the sequences as long as a row, others in pairs."""
    random = np.random.default_rng(seed)
    found: list[int] = []
    for row in range(rows):
        first = LENGTH if row % 7 in (0, 2, 4) else int(random.integers(16, LENGTH - 16))
        found += [first, LENGTH - first] if first < LENGTH else [first]
    return found


def _attention(joined: Tensor, cu_seqlens: Tensor, backend: AttentionBackend) -> Callable[[], Tensor]:
    mask = mask_for(backend, cu_seqlens, ROWS, LENGTH, joined.dtype)

    def attend() -> Tensor:
        columns = split_columns(joined, [HEADS * HEAD_SIZE] * 3)
        query, key, value = (part.unflatten(-1, (HEADS, HEAD_SIZE)) for part in columns)
        return packed_attention(
            query, key, value, cu_seqlens, LENGTH, dropout=DROPOUT, rows=ROWS, backend=backend, mask=mask
        )  # fmt: skip

    return attend
