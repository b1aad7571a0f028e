# mypy: ignore-errors
"""The Triton kernel of a data gradient with the ReLU below in its epilogue, and with that layer's bias gradient."""

import triton
import triton.language as tl


@triton.jit
def masked_product_kernel(
    g_tiles, w_tiles, y_at, masked_at, partials_at, count, inputs, outputs,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write g w where y passed its ReLU and 0 elsewhere, and the column sums of each row of tiles.

    Args:
        g_tiles: descriptor of (count, outputs), in blocks of ROWS x DEPTH; zeros are read beyond its end.
        w_tiles: descriptor of (outputs, inputs), in blocks of DEPTH x COLUMNS.
        y_at: (count, inputs) dense, output of the layer below.
        masked_at: likewise, in the dtype of g: gradient of what went into that layer's ReLU.
        partials_at: float32 (row tiles, inputs).
        GROUP: rows of tiles that are computed together, so that they find w and g in the cache.
    """
    row_tiles, column_tiles = tl.cdiv(count, ROWS), tl.cdiv(inputs, COLUMNS)
    group = tl.program_id(0) // (GROUP * column_tiles)
    inside = tl.program_id(0) % (GROUP * column_tiles)
    rows_of_group = tl.minimum(row_tiles - group * GROUP, GROUP)
    row_tile, column_tile = group * GROUP + inside % rows_of_group, inside // rows_of_group
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for depth in range(0, outputs, DEPTH):
        g = g_tiles.load([row_tile * ROWS, depth])
        w = w_tiles.load([depth, column_tile * COLUMNS])
        sums = tl.dot(g, w, sums)
    row, column = row_tile * ROWS + tl.arange(0, ROWS), column_tile * COLUMNS + tl.arange(0, COLUMNS)
    exists = (row < count)[:, None] & (column < inputs)[None, :]
    at = row.to(tl.int64)[:, None] * inputs + column[None, :]
    y = tl.load(y_at + at, mask=exists, other=0.0)
    masked = tl.where(y <= 0, 0.0, sums).to(masked_at.dtype.element_ty)  # not y > 0: where y is NaN, it passes
    tl.store(masked_at + at, masked, mask=exists)
    shares = tl.sum(masked.to(tl.float32), axis=0)  # of what was rounded, as PyTorch sums it
    tl.store(partials_at + row_tile * inputs + column, shares, mask=column < inputs)
