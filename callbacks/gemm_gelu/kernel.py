# mypy: ignore-errors
"""The Triton kernels: a matrix product whose tiles become GELU, or GELU's gradient, before they leave the registers.

GELU is computed as x * sigmoid(x * Q(x * x)) for a polynomial Q, which holds for both forms. For the tanh form it is an
identity: (1 + tanh(u)) / 2 = sigmoid(2 u), and 2 u = x (a + b x^2) (Hendrycks and Gimpel, arXiv 1606.08415). For the
erf form Q was fitted to log(P / (1 - P)) / x, P the normal distribution function: see `form.py`. The derivative comes
from the same exponential.

What bounds it on an H200: 16,384 x 4,096 elements, of 1,024 products each, take the tensor cores 0.17 ms, and each
instruction for every element 2 us on all multiprocessors together, so a GELU of thirty would add a third. Therefore it
is short, and two programs share a multiprocessor, so that one multiplies while the other does its GELU.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # as decided when this module is imported
MINUS_LOG2E = tl.constexpr(-1.4426950408889634)


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
        GROUP: rows of tiles whose columns are done together, so that weights are found in the cache.
        PARTS: 1, 2 or 4, of a tile's columns, one after another in the epilogue.
        STAGGER_NS: by which a second program of a multiprocessor starts later.
        PERSISTENT: programs take several tiles.
        FLATTEN: the next tile's first loads begin before a tile is through.
    """
    _stagger(multiprocessors, STAGGER_NS)
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    last = tiles_m * tiles_n if PERSISTENT else tl.program_id(0) + 1
    step = tl.num_programs(0)
    for tile in tl.range(tl.program_id(0), last, step, flatten=FLATTEN):
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
            first = column + part * WIDTH
            value = parts[part]
            if HAS_BIAS:
                n = first + tl.arange(0, WIDTH)
                value += tl.load(bias + n, mask=n < columns, other=0).to(tl.float32)[None, :]
            activation, derivative = gelu_and_slope(value, FORM, LARGEST)
            _store(hidden, activation, row, first, rows, columns, hidden_stride, BLOCK_M, WIDTH, TMA)
            if KEEP_SLOPE:
                _store(slope, derivative, row, first, rows, columns, slope_stride, BLOCK_M, WIDTH, TMA)


@triton.jit
def gelu_backward_kernel(
    dy, weight, slope, result, partial_sums,
    rows, columns, depth, dy_stride, weight_stride, slope_stride, result_stride, multiprocessors,
    COLUMN_SUMS: tl.constexpr, TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    STAGGER_NS: tl.constexpr, PERSISTENT: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Write result = (dy @ weight) * slope, and its sums over the rows of each tile.

    Args:
        dy: (rows, depth).
        weight: (depth, columns).
        slope: (rows, columns), from the forward.
        result: (rows, columns): the gradient of what went into GELU.
        partial_sums: float32 (tiles of rows, columns), a pointer; not written unless COLUMN_SUMS.
        rows: of the result; this and all others as in `linear_gelu_kernel`.
        columns: see there.
        depth: see there.
        dy_stride: see there.
        weight_stride: see there.
        slope_stride: see there.
        result_stride: see there.
        multiprocessors: see there.
        COLUMN_SUMS: the bias has a gradient.
        TMA: see there.
        BLOCK_M: see there.
        BLOCK_N: see there.
        BLOCK_K: see there.
        GROUP: see there.
        PARTS: see there.
        STAGGER_NS: see there.
        PERSISTENT: see there.
        FLATTEN: see there.
    """
    _stagger(multiprocessors, STAGGER_NS)
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    last = tiles_m * tiles_n if PERSISTENT else tl.program_id(0) + 1
    step = tl.num_programs(0)
    for tile in tl.range(tl.program_id(0), last, step, flatten=FLATTEN):
        tile_m, tile_n = _place(tile, tiles_m, tiles_n, GROUP)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, tl.cdiv(depth, BLOCK_K)):
            a = _load(dy, row, k * BLOCK_K, rows, depth, dy_stride, BLOCK_M, BLOCK_K, TMA)
            b = _load(weight, k * BLOCK_K, column, depth, columns, weight_stride, BLOCK_K, BLOCK_N, TMA)
            total = tl.dot(a, b, total, input_precision="ieee")
        parts = _parts(total, PARTS)
        WIDTH: tl.constexpr = BLOCK_N // PARTS
        for part in tl.static_range(PARTS):
            first = column + part * WIDTH
            derivative = _load(slope, row, first, rows, columns, slope_stride, BLOCK_M, WIDTH, TMA)
            gradient = parts[part] * derivative.to(tl.float32)
            _store(result, gradient, row, first, rows, columns, result_stride, BLOCK_M, WIDTH, TMA)
            if COLUMN_SUMS:
                n = first + tl.arange(0, WIDTH)
                # Rows that don't exist were read as zeros. Not by atomics: their order differs from run to run.
                tl.store(partial_sums + tile_m * columns + n, tl.sum(gradient, axis=0), mask=n < columns)


@triton.jit
def gelu_and_slope(x, FORM: tl.constexpr, LARGEST: tl.constexpr):
    """Return gelu(x) and its derivative, for float32 x."""
    square = x * x
    if LARGEST is not None:
        square = tl.minimum(square, LARGEST)
    DEGREE: tl.constexpr = len(FORM) - 1
    q = tl.full(x.shape, FORM[DEGREE] * MINUS_LOG2E, tl.float32)
    # Of x Q(x^2): each power's own exponent comes down, so that a coefficient is multiplied by 1, 3, 5, ...
    q_slope = tl.full(x.shape, FORM[DEGREE] * (2 * DEGREE + 1), tl.float32)
    for i in tl.static_range(DEGREE):
        q = q * square + FORM[DEGREE - 1 - i] * MINUS_LOG2E
        q_slope = q_slope * square + FORM[DEGREE - 1 - i] * (2 * (DEGREE - 1 - i) + 1)
    sigmoid = _reciprocal(1.0 + tl.exp2(x * q))
    activation = x * sigmoid
    return activation, sigmoid + (activation - activation * sigmoid) * q_slope


@triton.jit
def _reciprocal(x):
    if INTERPRETED:
        y = 1.0 / x
    else:
        # A division is six instructions; this is one, wrong by a unit in float32's last place. Of infinity it is 0.
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


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
def _place(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Return row and column of a tile: GROUP rows are gone through column by column."""
    group = tile // (GROUP * tiles_n)
    rows_of_group = tl.minimum(tiles_m - group * GROUP, GROUP)
    inside = tile % (GROUP * tiles_n)
    return group * GROUP + inside % rows_of_group, inside // rows_of_group


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
