# mypy: ignore-errors
"""The Triton kernels: one cast of all parameters of a chain, and the two ends of a chain that tensor cores don't fit.

A first layer with few inputs (DLRM has 13) reads a matrix whose rows are no multiple of 16 bytes, which cuBLAS's fast
kernels don't take. Here [x, 1] and [W, b], padded with zeros to 16 columns in registers, are multiplied, so that the
bias comes with it; and the gradient's [dW, db] = g' [x, 1] is one product too, over masked gradients that nobody else
needs. A last layer with one output is no matrix product at all but memory traffic: one pass forward, one backward.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # as decided when this module is imported


@triton.jit
def cast_kernel(sources, targets, sizes, BLOCK: tl.constexpr):
    """Copy every source to its target in the target's dtype; a program takes BLOCK elements of one of them.

    Args:
        sources, targets: pointers to dense tensors, as many of each.
        sizes: their elements.
        BLOCK: there is a program for each begun block of each tensor, in order.
    """
    block = tl.program_id(0)
    for i in tl.static_range(len(sources)):
        blocks = tl.cdiv(sizes[i], BLOCK)
        if (block >= 0) & (block < blocks):
            at = block * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(sources[i] + at, mask=at < sizes[i])
            tl.store(targets[i] + at, value.to(targets[i].dtype.element_ty), mask=at < sizes[i])
        block -= blocks


@triton.jit
def narrow_in_kernel(
    x_at, w_at, b_at, y_at, count, outputs, x_stride,
    INPUTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write y = relu(x W' + b), one tile a program.

    Args:
        x_at: (count, INPUTS), x_stride elements from row to row.
        w_at, b_at: (outputs, INPUTS) dense and (outputs,). All three are rounded to y's dtype first.
        y_at: (count, outputs) dense.
        PADDED: a power of two, 16 or more, greater than INPUTS.
        ROWS, COLUMNS: of a tile.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    dtype = y_at.dtype.element_ty
    x = _with_ones(x_at, row, count, x_stride, INPUTS, PADDED, ROWS).to(dtype)
    k = tl.arange(0, PADDED)
    in_w = (column < outputs)[None, :] & (k < INPUTS)[:, None]
    w = tl.load(w_at + column[None, :] * INPUTS + k[:, None], mask=in_w, other=0.0).to(tl.float32)
    b = tl.load(b_at + column, mask=column < outputs, other=0.0).to(tl.float32)
    w = tl.where((k == INPUTS)[:, None], b[None, :], w).to(dtype)
    y = tl.dot(x, w, input_precision="ieee")
    y = tl.where(y <= 0, 0.0, y)  # not y > 0: NaN stays NaN, as in PyTorch
    inside = (row < count)[:, None] & (column < outputs)[None, :]
    tl.store(y_at + row.to(tl.int64)[:, None] * outputs + column[None, :], y.to(dtype), mask=inside)


@triton.jit
def narrow_in_backward_kernel(
    g_at, y_at, x_at, partials_at, count, outputs, x_stride,
    INPUTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Write a program's share of [dW, db], over every n-th tile of rows, for COLUMNS of the layer's outputs.

    Args:
        g_at: (count, outputs) dense, gradient of y; of what went into the ReLU if MASKED.
        y_at: (count, outputs) dense; not read if MASKED.
        x_at: as of the forward.
        partials_at: float32 (programs of axis 1, outputs, PADDED): dW in the first INPUTS columns, db in the next.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tile, tiles = tl.program_id(1), tl.cdiv(count, ROWS)
    dtype = g_at.dtype.element_ty
    sums = tl.zeros((COLUMNS, PADDED), tl.float32)
    while tile < tiles:
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < count)[None, :] & (column < outputs)[:, None]
        at = row.to(tl.int64)[None, :] * outputs + column[:, None]
        g = tl.load(g_at + at, mask=inside, other=0.0)
        if not MASKED:
            g = tl.where(tl.load(y_at + at, mask=inside, other=0.0) <= 0, 0.0, g).to(dtype)
        x = _with_ones(x_at, row, count, x_stride, INPUTS, PADDED, ROWS).to(dtype)
        sums = tl.dot(g, x, sums, input_precision="ieee")
        tile += tl.num_programs(1)
    k = tl.arange(0, PADDED)
    at = (tl.program_id(1) * outputs + column[:, None]) * PADDED + k[None, :]
    tl.store(partials_at + at, sums, mask=(column < outputs)[:, None])


@triton.jit
def narrow_in_fold_kernel(
    partials_at, dw_at, db_at, shares, outputs,
    INPUTS: tl.constexpr, PADDED: tl.constexpr, SHARES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up the shares of the backward kernel, in order, into dW (outputs, INPUTS) and db (outputs,), dense.

    Args:
        SHARES: a power of two from `shares` on.
        COLUMNS: of the outputs * PADDED sums of a share, for each program.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    share = tl.arange(0, SHARES)
    exists = (share < shares)[:, None] & (column < outputs * PADDED)[None, :]
    values = tl.load(partials_at + share[:, None] * (outputs * PADDED) + column[None, :], mask=exists, other=0.0)
    sums = tl.sum(values, axis=0)
    output, k = column // PADDED, column % PADDED
    tl.store(dw_at + output * INPUTS + k, sums.to(dw_at.dtype.element_ty), mask=(output < outputs) & (k < INPUTS))
    tl.store(db_at + output, sums.to(db_at.dtype.element_ty), mask=(output < outputs) & (k == INPUTS))


@triton.jit
def _with_ones(
    x_at, row, count, x_stride, INPUTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    k = tl.arange(0, PADDED)
    inside = (row < count)[:, None] & (k < INPUTS)[None, :]
    x = tl.load(x_at + row.to(tl.int64)[:, None] * x_stride + k[None, :], mask=inside, other=0.0).to(tl.float32)
    return tl.where((k == INPUTS)[None, :], 1.0, x)


@triton.jit
def narrow_out_kernel(
    y_at, w_at, b_at, z_at, count, INPUTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Write z = y w + b for ROWS rows.

    Args:
        y_at: (count, INPUTS) dense.
        w_at, b_at: (INPUTS,) and (1,), rounded to y's dtype first.
        z_at: (count,).
        PADDED: the first power of two from INPUTS on.
    """
    row, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    dtype = y_at.dtype.element_ty
    w = tl.load(w_at + k, mask=k < INPUTS, other=0.0).to(dtype).to(tl.float32)
    inside = (row < count)[:, None] & (k < INPUTS)[None, :]
    y = tl.load(y_at + row.to(tl.int64)[:, None] * INPUTS + k[None, :], mask=inside, other=0.0).to(tl.float32)
    z = tl.sum(y * w[None, :], axis=1) + tl.load(b_at).to(dtype).to(tl.float32)
    tl.store(z_at + row, z.to(z_at.dtype.element_ty), mask=row < count)


@triton.jit
def narrow_out_backward_kernel(
    g_at, y_at, w_at, masked_at, partials_at, count,
    INPUTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of what went into the ReLU that made y, and a program's shares of three sums.

    Args:
        g_at: (count,), gradient of z.
        y_at, w_at: as of the forward.
        masked_at: (count, INPUTS) dense, in y's dtype: g w' where y passed its ReLU.
        partials_at: float32 (programs, 2 * INPUTS + 1): dw = g' y; the column sums of `masked`, which are the gradient
            of the bias one layer below; db = sum of g. A program takes every n-th tile of rows.
    """
    k, tile, tiles = tl.arange(0, PADDED), tl.program_id(0), tl.cdiv(count, ROWS)
    dtype = y_at.dtype.element_ty
    w = tl.load(w_at + k, mask=k < INPUTS, other=0.0).to(dtype).to(tl.float32)
    dw, below = tl.zeros((ROWS, PADDED), tl.float32), tl.zeros((ROWS, PADDED), tl.float32)
    db = tl.zeros((ROWS,), tl.float32)
    while tile < tiles:
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < count)[:, None] & (k < INPUTS)[None, :]
        at = row.to(tl.int64)[:, None] * INPUTS + k[None, :]
        g = tl.load(g_at + row, mask=row < count, other=0.0).to(tl.float32)
        y = tl.load(y_at + at, mask=inside, other=0.0)
        masked = tl.where(y <= 0, 0.0, g[:, None] * w[None, :]).to(dtype)
        tl.store(masked_at + at, masked, mask=inside)
        dw += g[:, None] * y.to(tl.float32)
        below += masked.to(tl.float32)
        db += g
        tile += tl.num_programs(0)
    share = partials_at + tl.program_id(0) * (2 * INPUTS + 1)
    tl.store(share + k, tl.sum(dw, axis=0), mask=k < INPUTS)
    tl.store(share + INPUTS + k, tl.sum(below, axis=0), mask=k < INPUTS)
    tl.store(share + 2 * INPUTS, tl.sum(db, axis=0))
