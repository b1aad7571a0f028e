# mypy: ignore-errors
"""The Triton kernels: one pass over the rows forward, one backward, and the sum of the backward's parts.

All are bound by memory. A program takes every n-th tile of ROWS rows, with the parameters loaded once, and adds up its
part of their gradients in registers. A tile is (ROWS, GROUPS, 8): for 8 neighbours one counter's random bits are
enough, and they lie in one thread, so that the choice among its four words costs no instruction.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # as decided when this module is imported
GROUP = tl.constexpr(8)  # of `mask`


@triton.jit(do_not_specialize=["threshold"])
def forward_kernel(
    x_at, residual_at, x_bias_at, weight_at, bias_at, seed_at, y_at, normalized_at, mean_at, rstd_at,
    rows, threshold, scale, eps,
    HIDDEN: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, ROUNDS: tl.constexpr, STAGES: tl.constexpr,
    RESIDUAL: tl.constexpr, X_BIAS: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    KEEP_NORMALIZED: tl.constexpr,
):  # fmt: skip
    """Write y = layer_norm([residual +] dropout(x [+ x_bias])) [* weight] [+ bias].

    Args:
        x_at, residual_at: (rows, HIDDEN).
        x_bias_at, weight_at, bias_at: (HIDDEN,).
        seed_at: int64 (1,).
        y_at: (rows, HIDDEN).
        normalized_at: as y, before weight and bias.
        mean_at, rstd_at: float32 (rows,), of the normalization.
        rows: how many.
        threshold: see `mask`.
        scale: of what is kept.
        eps: added to the variance.
        HIDDEN: elements of a row.
        GROUPS: of 8 elements, the first power of two of them that holds a row.
        ROWS: of a tile, a power of two.
        ROUNDS: of Philox.
        STAGES: of the loop's pipeline: how many tiles are on their way.
        RESIDUAL, X_BIAS, WEIGHT, BIAS, DROPOUT: whether there is one.
        KEEP_NORMALIZED: write it.
    """
    column, in_row = _columns(HIDDEN, GROUPS, ROWS)
    if X_BIAS:
        x_bias = tl.load(x_bias_at + column, mask=in_row, other=0).to(tl.float32)
    if WEIGHT:
        weight = tl.load(weight_at + column, mask=in_row, other=0).to(tl.float32)
    if BIAS:
        bias = tl.load(bias_at + column, mask=in_row, other=0).to(tl.float32)
    if DROPOUT:
        seed = tl.load(seed_at)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None, None] * HIDDEN + column
        exists = (row < rows)[:, None, None] & in_row
        value = tl.load(x_at + at, mask=exists, other=0).to(tl.float32)
        if X_BIAS:
            value += x_bias
        if DROPOUT:
            value = tl.where(_keep(seed, row, threshold, GROUPS, ROUNDS), value * scale, 0.0)
        if RESIDUAL:
            value += tl.load(residual_at + at, mask=exists, other=0).to(tl.float32)
        mean = _row_sum(value) / HIDDEN
        centered = tl.where(in_row, value - mean[:, None, None], 0.0)
        rstd = 1.0 / tl.sqrt(_row_sum(centered * centered) / HIDDEN + eps)
        normalized = centered * rstd[:, None, None]
        if KEEP_NORMALIZED:
            tl.store(normalized_at + at, normalized.to(normalized_at.dtype.element_ty), mask=exists)
        tl.store(mean_at + row, mean, mask=row < rows)
        tl.store(rstd_at + row, rstd, mask=row < rows)
        if WEIGHT:
            normalized *= weight
        if BIAS:
            normalized += bias
        tl.store(y_at + at, normalized.to(y_at.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["threshold"])
def backward_kernel(
    dy_at, dy_twin_at, x_at, residual_at, x_bias_at, normalized_at, weight_at, mean_at, rstd_at, seed_at, dx_at,
    dresidual_at, parts_at, rows, threshold, scale,
    HIDDEN: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, ROUNDS: tl.constexpr, STAGES: tl.constexpr,
    RESIDUAL: tl.constexpr, X_BIAS: tl.constexpr, WEIGHT: tl.constexpr, DROPOUT: tl.constexpr,
    KEPT_NORMALIZED: tl.constexpr, TWIN: tl.constexpr, WANT_DX: tl.constexpr, WANT_DRESIDUAL: tl.constexpr,
    WANT_DWEIGHT: tl.constexpr, WANT_DBIAS: tl.constexpr, WANT_DX_BIAS: tl.constexpr,
):  # fmt: skip
    """Write dx and dresidual, and each program's part of the gradients of weight, bias and x_bias.

    Args as of `forward_kernel`, and:
        dy_at, dy_twin_at: (rows, HIDDEN); the gradient of y is their sum if TWIN, else the first.
        dx_at, dresidual_at: (rows, HIDDEN).
        parts_at: float32 (3, programs, HIDDEN).
        KEPT_NORMALIZED: read it; else it is computed again from x and residual.
        WANT_...: what is to be written.
    """
    column, in_row = _columns(HIDDEN, GROUPS, ROWS)
    if WEIGHT:
        weight = tl.load(weight_at + column, mask=in_row, other=0).to(tl.float32)
    if X_BIAS and not KEPT_NORMALIZED:
        x_bias = tl.load(x_bias_at + column, mask=in_row, other=0).to(tl.float32)
    if DROPOUT:
        seed = tl.load(seed_at)
    dweight = tl.zeros([ROWS, GROUPS, GROUP], tl.float32)
    dbias = tl.zeros([ROWS, GROUPS, GROUP], tl.float32)
    dx_bias = tl.zeros([ROWS, GROUPS, GROUP], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None, None] * HIDDEN + column
        exists = (row < rows)[:, None, None] & in_row
        dy = tl.load(dy_at + at, mask=exists, other=0).to(tl.float32)
        if TWIN:
            dy += tl.load(dy_twin_at + at, mask=exists, other=0).to(tl.float32)
        rstd = tl.load(rstd_at + row, mask=row < rows, other=0)[:, None, None]
        if DROPOUT:
            keep = _keep(seed, row, threshold, GROUPS, ROUNDS)
        if KEPT_NORMALIZED:
            normalized = tl.load(normalized_at + at, mask=exists, other=0).to(tl.float32)
        else:
            value = tl.load(x_at + at, mask=exists, other=0).to(tl.float32)
            if X_BIAS:
                value += x_bias
            if DROPOUT:
                value = tl.where(keep, value * scale, 0.0)
            if RESIDUAL:
                value += tl.load(residual_at + at, mask=exists, other=0).to(tl.float32)
            mean = tl.load(mean_at + row, mask=row < rows, other=0)[:, None, None]
            normalized = tl.where(exists, (value - mean) * rstd, 0.0)
        if WANT_DWEIGHT:
            dweight += dy * normalized
        if WANT_DBIAS:
            dbias += dy
        if WANT_DX or WANT_DRESIDUAL or WANT_DX_BIAS:
            slope = dy * weight if WEIGHT else dy
            along = (_row_sum(slope * normalized) / HIDDEN)[:, None, None]
            level = (_row_sum(slope) / HIDDEN)[:, None, None]
            gradient = (slope - normalized * along - level) * rstd
            if WANT_DRESIDUAL:
                tl.store(dresidual_at + at, gradient.to(dresidual_at.dtype.element_ty), mask=exists)
            if DROPOUT:
                gradient = tl.where(keep, gradient * scale, 0.0)
            if WANT_DX_BIAS:
                dx_bias += gradient
            if WANT_DX:
                tl.store(dx_at + at, gradient.to(dx_at.dtype.element_ty), mask=exists)
    if WANT_DWEIGHT:
        _store_part(parts_at, 0, dweight, HIDDEN, GROUPS)
    if WANT_DBIAS:
        _store_part(parts_at, 1, dbias, HIDDEN, GROUPS)
    if WANT_DX_BIAS:
        _store_part(parts_at, 2, dx_bias, HIDDEN, GROUPS)


@triton.jit
def sum_kernel(
    parts_at, dweight_at, dbias_at, dx_bias_at, programs,
    HIDDEN: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, WANT_DWEIGHT: tl.constexpr,
    WANT_DBIAS: tl.constexpr, WANT_DX_BIAS: tl.constexpr,
):  # fmt: skip
    """Add up the parts, always in the same order: float32 (3, programs, HIDDEN) to three times (HIDDEN,).

    A program takes COLUMNS of one of the three, PARTS at once.
    """
    kind = tl.program_id(1)
    if WANT_DWEIGHT and kind == 0:
        _add_up(parts_at, dweight_at, programs, 0, HIDDEN, COLUMNS, PARTS)
    if WANT_DBIAS and kind == 1:
        _add_up(parts_at, dbias_at, programs, 1, HIDDEN, COLUMNS, PARTS)
    if WANT_DX_BIAS and kind == 2:
        _add_up(parts_at, dx_bias_at, programs, 2, HIDDEN, COLUMNS, PARTS)


@triton.jit
def _add_up(
    parts_at, result_at, programs, kind: tl.constexpr, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([PARTS, COLUMNS], tl.float32)
    for start in range(0, programs, PARTS):
        part = start + tl.arange(0, PARTS)
        exists = (part < programs)[:, None] & (column < HIDDEN)[None, :]
        at = (kind * programs + part)[:, None] * HIDDEN + column[None, :]
        total += tl.load(parts_at + at, mask=exists, other=0)
    tl.store(result_at + column, tl.sum(total, axis=0).to(result_at.dtype.element_ty), mask=column < HIDDEN)


@triton.jit
def _columns(HIDDEN: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """Return the column of each element of a tile and whether it exists, (ROWS, GROUPS, 8).

    Parameters are loaded for each of the rows: as a single row they would get a layout of their own, and go through
    shared memory in each turn of the loop.
    """
    in_row = tl.arange(0, GROUPS)[None, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
    column = tl.zeros([ROWS, 1, 1], tl.int32) + in_row
    return column, column < HIDDEN


@triton.jit
def _row_sum(value):
    return tl.sum(tl.sum(value, axis=2), axis=1)


@triton.jit
def _keep(seed, row, threshold, GROUPS: tl.constexpr, ROUNDS: tl.constexpr):
    """Return what dropout keeps of a tile, (rows, GROUPS, 8); `mask.keep_mask` is the same."""
    zero = tl.zeros([row.shape[0], GROUPS], tl.int32)
    group = zero + tl.arange(0, GROUPS)[None, :]
    word0, word1, word2, word3 = tl.philox(seed, group, zero + row[:, None], zero, zero, ROUNDS)
    place = tl.arange(0, GROUP)[None, None, :]
    lower = tl.where(place < 2, word0[:, :, None], word1[:, :, None])
    upper = tl.where(place < 6, word2[:, :, None], word3[:, :, None])
    word = tl.where(place < 4, lower, upper)
    half = tl.where(place % 2 == 0, word & 0xFFFF, word >> 16)
    return half.to(tl.int32) >= threshold


@triton.jit
def _store_part(parts_at, kind: tl.constexpr, value, HIDDEN: tl.constexpr, GROUPS: tl.constexpr):
    at = parts_at + (kind * tl.num_programs(0) + tl.program_id(0)) * HIDDEN
    column = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(at + column, tl.sum(value, axis=0), mask=column < HIDDEN)
