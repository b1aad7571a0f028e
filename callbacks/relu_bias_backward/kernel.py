# mypy: ignore-errors
"""The Triton kernels: ReLU's gradient and each program's column sums in one pass over memory, then a sum of these."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # as decided when this module is imported


@triton.jit
def backward_kernel(
    g_at, y_at, masked_at, partials_at, rows, tiles,
    WIDTH: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write g where y passed the ReLU and 0 elsewhere, and each program's sums of that over its rows.

    Args:
        g_at, y_at, masked_at: (rows, WIDTH) each, dense; y and masked are not touched unless RELU.
        partials_at: float32 (programs of axis 0, WIDTH).
        rows: how many there are.
        tiles: ceil(rows / ROWS), for all programs of axis 0 together.
        WIDTH: elements of a row.
        RELU: there is a ReLU to go back through; without one g is summed up as it is.
        ROWS, COLUMNS: of a tile; powers of two. Axis 1 of the programs has ceil(WIDTH / COLUMNS).
    """
    tile, programs = tl.program_id(0), tl.num_programs(0)
    row_inside = tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = row_inside * WIDTH + column[None, :]
    column_exists = column < WIDTH
    # One sum for each element of a tile: threads need not talk to each other before the end.
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    while tile < tiles:
        start = tile.to(tl.int64) * (ROWS * WIDTH)
        exists = (row_inside < rows - tile * ROWS) & column_exists[None, :]
        g = tl.load(g_at + start + inside, mask=exists, other=0)
        if RELU:
            y = tl.load(y_at + start + inside, mask=exists, other=0)
            g = tl.where(y <= 0, 0.0, g)  # not y > 0: where y is NaN, a loss scaler has to see it
            g = g.to(masked_at.dtype.element_ty)
            tl.store(masked_at + start + inside, g, mask=exists)
        sums += g.to(tl.float32)
        tile += programs
    tl.store(partials_at + tl.program_id(0) * WIDTH + column, tl.sum(sums, axis=0), mask=column_exists)


@triton.jit
def fold_kernel(
    partials_at, sums_at, rows, CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Write the column sums of `partials`, float32 (rows, CHANNELS), one program for each COLUMNS of them."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row = tl.arange(0, ROWS)[:, None]
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    start = 0
    while start < rows:
        exists = (row < rows - start) & (column < CHANNELS)
        sums += tl.load(partials_at + (start + row) * CHANNELS + column, mask=exists, other=0.0)
        start += ROWS
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(sums_at + column, tl.sum(sums, axis=0), mask=column < CHANNELS)
