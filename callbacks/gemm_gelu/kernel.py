# mypy: ignore-errors
"""The Triton kernels: a matrix product whose tiles become GELU, or GELU's gradient, before they leave the registers.

What bounds it on an H200: 16,384 x 4,096 elements, of 1,024 products each, take the tensor cores 0.17 ms, and each
instruction for every element 2 us on all multiprocessors together, so an epilogue of thirty would add a third.
Therefore it is short, and two programs share a multiprocessor, so that one multiplies while the other is at its end.
"""

import triton
import triton.language as tl

from fasttrain.callbacks.gemm_gelu.gelu_kernel import INTERPRETED, gelu_and_slope


@triton.jit
def linear_gelu_kernel(
    x, weight, bias, hidden, slope,
    rows, columns, depth, x_stride, weight_stride, hidden_stride, slope_stride, multiprocessors,
    FORM: tl.constexpr, LARGEST: tl.constexpr, HAS_BIAS: tl.constexpr, KEEP_SLOPE: tl.constexpr, TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    STAGGER_NS: tl.constexpr, PERSISTENT: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Write hidden = gelu(x @ weight^T + bias) and slope = gelu'(the same).

    Args:
        x: (rows, depth), and all others: pointers, or tensor descriptors if TMA; rows are contiguous.
        weight: (columns, depth).
        bias: pointer to (columns,); not read unless HAS_BIAS.
        hidden: (rows, columns).
        slope: (rows, columns); not written unless KEEP_SLOPE.
        rows: of the result.
        columns: of the result.
        depth: number of products of each element.
        x_stride: from row to row, as the next three; read unless TMA.
        weight_stride: see there.
        hidden_stride: see there.
        slope_stride: see there.
        multiprocessors: after that many programs, the next may share their multiprocessors.
        FORM: coefficients of Q.
        LARGEST: of x * x in Q, None for no bound.
        HAS_BIAS: whether there is one.
        KEEP_SLOPE: for a backward.
        TMA: the first five are tensor descriptors.
        BLOCK_M: rows of a tile.
        BLOCK_N: columns of a tile.
        BLOCK_K: products at once.
        GROUP: rows of tiles whose columns are done together, so that weights are found in the cache; 0 if the tiles of
            a program have the same columns, and programs are a multiple of tiles in a row.
        PARTS: 1, 2 or 4, of a tile's columns, one after another in the epilogue.
        STAGGER_NS: by which a second program of a multiprocessor starts later.
        PERSISTENT: programs take several tiles.
        FLATTEN: the next tile's first loads begin before a tile is through.
    """
    _stagger(multiprocessors, STAGGER_NS)
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    first, last, step = _own_tiles(tiles_m, tiles_n, GROUP, PERSISTENT)
    for tile in tl.range(first, last, step, flatten=FLATTEN):
        row, column = _place(tile, tiles_m, tiles_n, GROUP)
        row, column = row * BLOCK_M, column * BLOCK_N
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, tl.cdiv(depth, BLOCK_K)):
            a = _load(x, row, k * BLOCK_K, rows, depth, x_stride, BLOCK_M, BLOCK_K, TMA)
            b = _load(weight, column, k * BLOCK_K, columns, depth, weight_stride, BLOCK_N, BLOCK_K, TMA)
            total = tl.dot(a, b.T, total, input_precision="ieee")
        parts = _parts(total, PARTS)
        WIDTH: tl.constexpr = BLOCK_N // PARTS
        for part in tl.static_range(PARTS):
            at = column + part * WIDTH
            value = parts[part]
            if HAS_BIAS:
                n = at + tl.arange(0, WIDTH)
                value += tl.load(bias + n, mask=n < columns, other=0).to(tl.float32)[None, :]
            activation, derivative = gelu_and_slope(value, FORM, LARGEST)
            _store(hidden, activation, row, at, rows, columns, hidden_stride, BLOCK_M, WIDTH, TMA)
            if KEEP_SLOPE:
                _store(slope, derivative, row, at, rows, columns, slope_stride, BLOCK_M, WIDTH, TMA)


@triton.jit
def gelu_backward_kernel(
    dy, weight, kept, result, partial_sums,
    rows, columns, depth, dy_stride, weight_stride, kept_stride, result_stride, multiprocessors,
    FORM: tl.constexpr, LARGEST: tl.constexpr, COLUMN_SUMS: tl.constexpr, TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    STAGGER_NS: tl.constexpr, PERSISTENT: tl.constexpr, FLATTEN: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Write result = (dy @ weight) * gelu', and its sums over the rows of each tile, or of each program's tiles.

    Args:
        dy: (rows, depth).
        weight: (depth, columns).
        kept: (rows, columns), from the forward: GELU's derivative, or its input.
        result: (rows, columns): the gradient of what went into GELU.
        partial_sums: float32, a pointer; not written unless COLUMN_SUMS. (tiles of rows, columns), or if GROUP is 0,
            (programs of a column, columns).
        rows: of the result; this and all others as in `linear_gelu_kernel`.
        columns: see there.
        depth: see there.
        dy_stride: see there.
        weight_stride: see there.
        kept_stride: see there.
        result_stride: see there.
        multiprocessors: see there.
        FORM: coefficients of Q if GELU's input was kept, None if its derivative was.
        LARGEST: see there.
        COLUMN_SUMS: the bias has a gradient.
        TMA: see there.
        BLOCK_M: see there.
        BLOCK_N: see there.
        BLOCK_K: see there.
        GROUP: see there; if 0, the sums of a program's tiles stay in its registers.
        PARTS: see there.
        STAGGER_NS: see there.
        PERSISTENT: see there.
        FLATTEN: see there.
        WARPS: of a program.
    """
    _stagger(multiprocessors, STAGGER_NS)
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    WIDTH: tl.constexpr = BLOCK_N // PARTS
    # Rows of a tile that lie in different threads: 8 for each warp, of which each has 16 rows at a time.
    APART: tl.constexpr = 8 * (WARPS if BLOCK_M // 16 > WARPS else BLOCK_M // 16)
    first, last, step = _own_tiles(tiles_m, tiles_n, GROUP, PERSISTENT)
    sums = _zeros(APART, WIDTH, PARTS)
    for tile in tl.range(first, last, step, flatten=FLATTEN):
        tile_m, tile_n = _place(tile, tiles_m, tiles_n, GROUP)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, tl.cdiv(depth, BLOCK_K)):
            a = _load(dy, row, k * BLOCK_K, rows, depth, dy_stride, BLOCK_M, BLOCK_K, TMA)
            b = _load(weight, k * BLOCK_K, column, depth, columns, weight_stride, BLOCK_K, BLOCK_N, TMA)
            total = tl.dot(a, b, total, input_precision="ieee")
        parts = _parts(total, PARTS)
        of_tile = ()
        for part in tl.static_range(PARTS):
            at = column + part * WIDTH
            derivative = _load(kept, row, at, rows, columns, kept_stride, BLOCK_M, WIDTH, TMA).to(tl.float32)
            if FORM is not None:
                _, derivative = gelu_and_slope(derivative, FORM, LARGEST)
            gradient = parts[part] * derivative
            _store(result, gradient, row, at, rows, columns, result_stride, BLOCK_M, WIDTH, TMA)
            if COLUMN_SUMS:
                # Rows that don't exist were read as zeros.
                if GROUP == 0:
                    of_tile = of_tile + (sums[part] + _sums_in_threads(gradient, APART),)  # noqa: RUF005
                else:
                    _store_sums(partial_sums + tile_m * columns, at, columns, gradient, WIDTH)
        if COLUMN_SUMS and GROUP == 0:
            sums = of_tile
    if COLUMN_SUMS and GROUP == 0:
        own = partial_sums + tl.program_id(0) // tiles_n * columns
        for part in tl.static_range(PARTS):
            at = tl.program_id(0) % tiles_n * BLOCK_N + part * WIDTH
            _store_sums(own, at, columns, sums[part], WIDTH)


@triton.jit
def _zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    zeros = tl.zeros([ROWS, COLUMNS], tl.float32)
    if PARTS == 1:
        every = (zeros,)
    elif PARTS == 2:
        every = (zeros, zeros)
    else:
        every = (zeros, zeros, zeros, zeros)
    return every


@triton.jit
def _sums_in_threads(tile, APART: tl.constexpr):
    """Return sums over rows, APART of them, such that on tensor cores' layout of a tile no threads need to talk.

    There, a warp has rows of 16, and a thread has the first and the ninth of them, or the second and the tenth, ...
    """
    sixteens = tl.reshape(tile, (tile.shape[0] // 16, 2, 8, tile.shape[1]))
    eights = tl.sum(sixteens, axis=1)
    if eights.shape[0] * 8 > APART:
        eights = tl.sum(tl.reshape(eights, (eights.shape[0] * 8 // APART, APART // 8, 8, tile.shape[1])), axis=0)
    return tl.reshape(eights, (APART, tile.shape[1]))


@triton.jit
def _store_sums(target, first, columns, addends, WIDTH: tl.constexpr):
    # Not by atomics: their order differs from run to run.
    n = first + tl.arange(0, WIDTH)
    tl.store(target + n, tl.sum(addends, axis=0), mask=n < columns)


@triton.jit
def _stagger(multiprocessors, NANOSECONDS: tl.constexpr):
    # Two programs that begin together multiply together and then both do their GELU, with idle tensor cores.
    if NANOSECONDS > 0 and not INTERPRETED:
        second = tl.program_id(0) // multiprocessors == 1
        if second:
            tl.inline_asm_elementwise(
                "nanosleep.u32 $1; mov.u32 $0, $1;", "=r,r", [tl.full([1], NANOSECONDS, tl.int32)], dtype=tl.int32,
                is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def _own_tiles(tiles_m, tiles_n, GROUP: tl.constexpr, PERSISTENT: tl.constexpr):
    """Return a program's range of tiles: counted within their column if GROUP is 0, else among all."""
    if GROUP == 0:
        first, last, step = tl.program_id(0) // tiles_n, tiles_m, tl.num_programs(0) // tiles_n
    else:
        first, last, step = tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)
    if not PERSISTENT:
        last = first + 1
    return first, last, step


@triton.jit
def _place(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Return row and column of a tile: GROUP rows are gone through column by column."""
    if GROUP == 0:
        place = (tile, tl.program_id(0) % tiles_n)
    else:
        group = tile // (GROUP * tiles_n)
        rows_of_group = tl.minimum(tiles_m - group * GROUP, GROUP)
        inside = tile % (GROUP * tiles_n)
        place = (group * GROUP + inside % rows_of_group, inside // rows_of_group)
    return place


@triton.jit
def _load(
    source, row, column, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    """Return a block of a matrix, with zeros where it has no elements."""
    if TMA:
        block = source.load([row, column])
    else:
        r, c = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        at = source + r.to(tl.int64)[:, None] * stride + c[None, :]
        block = tl.load(at, mask=(r < rows)[:, None] & (c < columns)[None, :], other=0)
    return block


@triton.jit
def _store(
    target, block, row, column, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    if TMA:
        target.store([row, column], block.to(target.dtype))
    else:
        r, c = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        at = target + r.to(tl.int64)[:, None] * stride + c[None, :]
        block = block.to(target.dtype.element_ty)
        tl.store(at, block, mask=(r < rows)[:, None] & (c < columns)[None, :])


@triton.jit
def _parts(tile, PARTS: tl.constexpr):
    """Return a tile's columns in 1, 2 or 4 parts."""
    if PARTS == 1:
        parts = (tile,)
    elif PARTS == 2:
        parts = _halves(tile)
    else:
        left, right = _halves(tile)
        a, b = _halves(left)
        c, d = _halves(right)
        parts = (a, b, c, d)
    return parts


@triton.jit
def _halves(tile):
    halved = tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2))
    return tl.split(tl.permute(halved, (0, 2, 1)))
