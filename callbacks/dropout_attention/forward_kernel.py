# mypy: ignore-errors
"""The Triton kernel of the forward: a program for each block of queries of a sequence and each head.

Softmax goes over blocks of keys with a running maximum (Dao, "FlashAttention-2", 2023), in base 2: exp(x) is
exp2(x log2 e), and log2 e is part of the scale. Blocks lie within a sequence, so that nothing is computed between two.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # as decided when this module is imported


@triton.jit(do_not_specialize=["threshold"])
def forward_kernel(
    query_at, key_at, value_at, output_at, lse_at, blocks_at, query_words_at, key_words_at,
    query_token, query_head, key_token, key_head, value_token, value_head, tokens, threshold, scale, kept_scale,
    HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    DROPOUT: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, TWICE: tl.constexpr,
):  # fmt: skip
    """Write softmax(scale Q K^T) V, and the softmax's logarithm of sums.

    Args:
        query_at, key_at, value_at: (tokens, HEADS, HEAD_SIZE) with these strides in tokens and heads, and 1.
        output_at: (tokens, HEADS, HEAD_SIZE), dense.
        lse_at: float32 (HEADS, tokens), in base 2.
        blocks_at: int32 (blocks, 3), see `blocks`, for QUERIES.
        query_words_at, key_words_at: int32 (HEADS, tokens) and (HEADS, tokens, 2), see `mask`.
        tokens: how many.
        threshold: see `mask`.
        scale: of logits, times log2 e; positive.
        kept_scale: 1 / (1 - dropout).
        QUERIES, KEYS: of a tile, powers of two.
        STAGES: of the loop's pipeline.
        TWICE: see `load_pairs`.
    """
    head = tl.program_id(0) % HEADS
    begin, length, first = block_of(blocks_at, tl.program_id(0) // HEADS)
    if first >= length:
        return
    row = first + tl.arange(0, QUERIES)
    q = load_rows(query_at + head * query_head, begin, row, length, query_token, HEAD_SIZE)
    if DROPOUT:
        row_word = load_numbers(query_words_at + head * tokens, begin, row, length)
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    output = tl.zeros([QUERIES, HEAD_SIZE], tl.float32)
    end = tl.minimum(length, first + QUERIES) if CAUSAL else length
    for start in tl.range(0, end, KEYS, num_stages=STAGES):
        column = start + tl.arange(0, KEYS)
        k = load_rows(key_at + head * key_head, begin, column, length, key_token, HEAD_SIZE)
        v = load_rows(value_at + head * value_head, begin, column, length, value_token, HEAD_SIZE)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        logits = tl.where(visible(row, column, length, CAUSAL), logits, float("-inf"))
        higher = tl.maximum(highest, tl.max(logits, axis=1) * scale)
        weights = tl.exp2(logits * scale - higher[:, None])
        faded = tl.exp2(highest - higher)
        total = total * faded + tl.sum(weights, axis=1)
        if DROPOUT:
            factor, term = load_pairs(key_words_at + head * tokens * 2, begin, column, length, TWICE)
            weights = tl.where(row_word[:, None] * factor[None, :] + term[None, :] >= threshold, weights, 0.0)
        output = output * faded[:, None]
        output = tl.dot(weights.to(v.dtype), v, output, input_precision=PRECISION)
        highest = higher
    output = output * (kept_scale / total)[:, None]
    store_rows(output_at + head * HEAD_SIZE, begin, row, length, HEADS * HEAD_SIZE, output, HEAD_SIZE)
    tl.store(lse_at + head * tokens + begin + row, highest + tl.log2(total), mask=row < length)


@triton.jit
def block_of(blocks_at, index):
    """Return where a block's sequence begins, int64, how long that is, and its first place in it."""
    at = blocks_at + index * 3
    return tl.load(at).to(tl.int64), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def load_rows(at, begin, place, length, stride, SIZE: tl.constexpr):
    """Return (places, SIZE) of a sequence, 0 behind its end: what is there is another sequence's, and may be NaN."""
    element = place[:, None] * stride + tl.arange(0, SIZE)[None, :]
    return tl.load(at + begin * stride + element, mask=(place < length)[:, None], other=0)


@triton.jit
def load_numbers(at, begin, place, length):
    """Return a number for each place, 0 behind the sequence's end."""
    return tl.load(at + begin + place, mask=place < length, other=0)


@triton.jit
def load_pairs(at, begin, place, length, TWICE: tl.constexpr = False):
    """Return two numbers for each place, which lie side by side, 0 behind the sequence's end.

    TWICE: load them two times. What has fewer elements than there are threads, the compiler has loaded by each thread
    that uses it, by instructions for each; what has more is loaded once, on its way through shared memory.
    """
    if TWICE:
        element = place[:, None] * 2 + tl.arange(0, 4)[None, :] % 2
        pairs = tl.load(at + begin * 2 + element, mask=(place < length)[:, None], other=0)
        factors, terms = tl.split(tl.reshape(pairs, [place.shape[0], 2, 2]))
        factor, _ = tl.split(factors)
        term, _ = tl.split(terms)
    else:
        element = place[:, None] * 2 + tl.arange(0, 2)[None, :]
        factor, term = tl.split(tl.load(at + begin * 2 + element, mask=(place < length)[:, None], other=0))
    return factor, term


@triton.jit
def store_rows(at, begin, place, length, stride, value, SIZE: tl.constexpr):
    """Write (places, SIZE) as far as the sequence goes."""
    element = place[:, None] * stride + tl.arange(0, SIZE)[None, :]
    tl.store(at + begin * stride + element, value.to(at.dtype.element_ty), mask=(place < length)[:, None])


@triton.jit
def visible(query, key, length, CAUSAL: tl.constexpr):
    """Return which keys a query looks at, (queries, keys) or (1, keys)."""
    inside = (key < length)[None, :]
    if CAUSAL:
        inside = inside & (key[None, :] <= query[:, None])
    return inside
