# mypy: ignore-errors
"""The Triton kernels of the backward: one by queries, which goes first, and one by keys.

With weights P, the mask of kept weights M and r = 1 / (1 - dropout):

    dV = r (P M)^T dO
    dS = r P (M (dO V^T) - delta),  delta = rowsum(dO O) / r
    dQ = scale dS K,  dK = scale dS^T Q

P is computed again from the logits and their logarithm of sums. Two kernels compute it twice, 7 products instead of 5;
in return each writes its results once, in their dtype, without atomic additions to a float32 copy that would have to be
cleared before and rounded afterwards.
"""

import triton
import triton.language as tl

from fasttrain.callbacks.dropout_attention.forward_kernel import (
    block_of,
    load_numbers,
    load_pairs,
    load_rows,
    store_rows,
    visible,
)


@triton.jit(do_not_specialize=["threshold"])
def query_kernel(
    query_at, key_at, value_at, output_at, upstream_at, lse_at, blocks_at, query_words_at, key_words_at,
    gradient_at, of_queries_at, query_token, query_head, key_token, key_head, value_token, value_head, upstream_token,
    upstream_head, gradient_token, gradient_head, tokens, threshold, scale, gradient_scale, kept_share,
    HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    DROPOUT: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, TWICE: tl.constexpr,
):  # fmt: skip
    """Write dQ, and what the other kernel needs of each query.

    Args as of `forward_kernel`, and:
        upstream_at: dO, as Q.
        gradient_at: dQ, as Q.
        of_queries_at: int32 (HEADS, tokens, 4), written: the bits of lse and of delta, the query's word, and nothing.
            Side by side the other kernel fetches them by one instruction.
        gradient_scale: scale of the logits, times r.
        kept_share: 1 / r.
    """
    head = tl.program_id(0) % HEADS
    begin, length, first = block_of(blocks_at, tl.program_id(0) // HEADS)
    if first >= length:
        return
    row = first + tl.arange(0, QUERIES)
    q = load_rows(query_at + head * query_head, begin, row, length, query_token, HEAD_SIZE)
    upstream = load_rows(upstream_at + head * upstream_head, begin, row, length, upstream_token, HEAD_SIZE)
    output = load_rows(output_at + head * HEAD_SIZE, begin, row, length, HEADS * HEAD_SIZE, HEAD_SIZE)
    delta = tl.sum(output.to(tl.float32) * upstream.to(tl.float32), axis=1) * kept_share
    lse = load_numbers(lse_at + head * tokens, begin, row, length)
    at = of_queries_at + (head * tokens + begin + row) * 4
    tl.store(at, lse.to(tl.int32, bitcast=True), mask=row < length)
    tl.store(at + 1, delta.to(tl.int32, bitcast=True), mask=row < length)
    if DROPOUT:
        row_word = load_numbers(query_words_at + head * tokens, begin, row, length)
        tl.store(at + 2, row_word, mask=row < length)
    gradient = tl.zeros([QUERIES, HEAD_SIZE], tl.float32)
    end = tl.minimum(length, first + QUERIES) if CAUSAL else length
    for start in tl.range(0, end, KEYS, num_stages=STAGES):
        column = start + tl.arange(0, KEYS)
        k = load_rows(key_at + head * key_head, begin, column, length, key_token, HEAD_SIZE)
        v = load_rows(value_at + head * value_head, begin, column, length, value_token, HEAD_SIZE)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        by_weight = tl.dot(upstream, tl.trans(v), input_precision=PRECISION)
        logits = tl.where(visible(row, column, length, CAUSAL), logits, float("-inf"))
        weights = tl.exp2(logits * scale - lse[:, None])
        if DROPOUT:
            factor, term = load_pairs(key_words_at + head * tokens * 2, begin, column, length, TWICE)
            by_weight = tl.where(row_word[:, None] * factor[None, :] + term[None, :] >= threshold, by_weight, 0.0)
        by_logit = weights * (by_weight - delta[:, None])
        gradient = tl.dot(by_logit.to(k.dtype), k, gradient, input_precision=PRECISION)
    store_rows(
        gradient_at + head * gradient_head, begin, row, length, gradient_token, gradient * gradient_scale, HEAD_SIZE
    )


@triton.jit(do_not_specialize=["threshold"])
def key_kernel(
    query_at, key_at, value_at, upstream_at, of_queries_at, blocks_at, key_words_at,
    key_gradient_at, value_gradient_at, query_token, query_head, key_token, key_head, value_token, value_head,
    upstream_token, upstream_head, gradient_token, gradient_head, tokens, threshold, scale, gradient_scale, kept_scale,
    HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    DROPOUT: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dK and dV, a program for each block of KEYS and each head.

    Args as of `query_kernel`; blocks are for KEYS. Tiles are transposed, (KEYS, QUERIES), so that the weights are left
    operands of the products that they go into, and stay in registers.
    """
    head = tl.program_id(0) % HEADS
    begin, length, first = block_of(blocks_at, tl.program_id(0) // HEADS)
    if first >= length:
        return
    row = first + tl.arange(0, KEYS)
    k = load_rows(key_at + head * key_head, begin, row, length, key_token, HEAD_SIZE)
    v = load_rows(value_at + head * value_head, begin, row, length, value_token, HEAD_SIZE)
    if DROPOUT:
        factor, term = load_pairs(key_words_at + head * tokens * 2, begin, row, length)
    by_key = tl.zeros([KEYS, HEAD_SIZE], tl.float32)
    by_value = tl.zeros([KEYS, HEAD_SIZE], tl.float32)
    for start in tl.range(first // QUERIES * QUERIES if CAUSAL else 0, length, QUERIES, num_stages=STAGES):
        # Queries behind the end are 0, and so are their upstream gradients, delta and lse: they add 0.
        column = start + tl.arange(0, QUERIES)
        q = load_rows(query_at + head * query_head, begin, column, length, query_token, HEAD_SIZE)
        upstream = load_rows(upstream_at + head * upstream_head, begin, column, length, upstream_token, HEAD_SIZE)
        logits = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        by_weight = tl.dot(v, tl.trans(upstream), input_precision=PRECISION)
        # Here, and not before the products: each is a register for a query.
        lse, delta, column_word = _load_of_queries(of_queries_at + head * tokens * 4, begin, column, length)
        weights = tl.exp2(logits * scale - lse[None, :])
        if CAUSAL:
            weights = tl.where(row[:, None] <= column[None, :], weights, 0.0)
        kept = weights
        if DROPOUT:
            keep = column_word[None, :] * factor[:, None] + term[:, None] >= threshold
            kept = tl.where(keep, weights, 0.0)
            by_weight = tl.where(keep, by_weight, 0.0)
        by_value = tl.dot(kept.to(upstream.dtype), upstream, by_value, input_precision=PRECISION)
        by_logit = weights * (by_weight - delta[None, :])
        by_key = tl.dot(by_logit.to(q.dtype), q, by_key, input_precision=PRECISION)
    at = head * gradient_head
    store_rows(key_gradient_at + at, begin, row, length, gradient_token, by_key * gradient_scale, HEAD_SIZE)
    store_rows(value_gradient_at + at, begin, row, length, gradient_token, by_value * kept_scale, HEAD_SIZE)


@triton.jit
def _load_of_queries(at, begin, place, length):
    """Return lse, delta and word of each place, 0 behind the sequence's end."""
    element = place[:, None] * 4 + tl.arange(0, 4)[None, :]
    numbers = tl.load(at + begin * 4 + element, mask=(place < length)[:, None], other=0)
    # `split` takes the last dimension apart: (lse, delta) is beside (word, nothing).
    even, odd = tl.split(tl.reshape(numbers, [place.shape[0], 2, 2]))
    lse, word = tl.split(even)
    delta, _ = tl.split(odd)
    return lse.to(tl.float32, bitcast=True), delta.to(tl.float32, bitcast=True), word
