# mypy: ignore-errors
"""The Triton kernels: a matrix product with all that surrounds a 1x1 convolution, and a pass that applies a gate.

A 1x1 convolution over a channels_last map is a product of (rows, depth) with (depth, columns), where rows are pixels.
Nearly all of these are bound by memory. Programs that follow one another take the tiles of one block of rows, so that
its left operand comes from memory once; the right one, at most 4 MB, stays in the L2 cache.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # as decided when this module is imported
# Elements of a vector, and bits of a byte of a gate.
WIDTH = tl.constexpr(8)


# Sizes that no vector depends on: without a kernel of its own for each kind.
@triton.jit(do_not_specialize=["rows", "height", "width", "other_height", "other_width"])
def product_kernel(
    left_at, right_at, left2_at, right2_at, bias_at, bias2_at, add_at, gate_at, y_at, bits_at,
    rows, columns, depth, depth2, height, width, other_height, other_width,
    STEP: tl.constexpr, RIGHT_IS_WIDE: tl.constexpr, SECOND: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    EARLY: tl.constexpr, RELU: tl.constexpr, GATE: tl.constexpr, KEEP_BITS: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Write y = gate(relu(left @ right [+ left2 @ right2] [+ bias] [+ add])), each part if asked for.

    Args:
        left_at, left2_at: (rows, depth), and (.., depth2) of another map, see STEP.
        right_at, right2_at: a convolution's weight, row-major (columns, depth), or (depth, columns) if RIGHT_IS_WIDE.
        bias_at, bias2_at: float32 (columns,); the second only if SECOND.
        add_at: (rows, columns), or (.., columns) of another map, see STEP.
        gate_at: what lets y pass: the bits that KEEP_BITS wrote (GATE 1), or values, where they are positive (GATE 2).
        y_at: (rows, columns).
        bits_at: uint8 (rows, columns / 8): which elements passed the ReLU; bit i of byte j is column 8 j + i.
        rows, columns, depth, depth2: sizes; multiples of the tile's but for rows.
        height, width, other_height, other_width: of y's map and of the other map, if STEP > 1.
        STEP: the stride of a convolution from the larger map to the smaller one. left2 is taken where it looks at it;
            add is of the smaller map, and zero at pixels between.
        EARLY: fetch `add` before the product, which takes registers and hides its latency.
        PRECISION: of tl.dot, for float32.
        ROWS, COLUMNS, DEPTH: of a tile.
    """
    across = columns // COLUMNS
    tile = tl.program_id(0)
    first = (tile // across).to(tl.int64) * ROWS
    column = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
    # Offsets within a tile are of 32 bits, which saves registers.
    row = tl.arange(0, ROWS)
    left_over = tl.minimum(rows - first, ROWS).to(tl.int32)
    safe_row = tl.minimum(row, left_over - 1)  # a load with a mask is dearer than loading the last row again
    exists = (row < left_over)[:, None]
    at = first * columns
    inside = row[:, None] * columns + column[None, :]
    if STEP > 1:
        pixel = first + safe_row
        line = (pixel // width).to(tl.int32)
        down, right, image = line % height, (pixel % width).to(tl.int32), (line // height).to(tl.int64)
    if ADD and EARLY:
        if STEP > 1:
            other_row = (image * other_height + down // STEP) * other_width + right // STEP
            has = exists & ((down % STEP == 0) & (right % STEP == 0))[:, None]
            add = tl.load(add_at + (other_row[:, None] * columns + column[None, :]), mask=has, other=0)
        else:
            add = tl.load(add_at + at + inside, mask=exists, other=0)
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    left = left_at + first * depth
    sums = _product(sums, left, right_at, safe_row, column, depth, columns, RIGHT_IS_WIDE, PRECISION, DEPTH)
    if SECOND:
        if STEP > 1:
            looked_at = (image * other_height + down * STEP) * other_width + right * STEP
            sums = _product(
                sums, left2_at, right2_at, looked_at, column, depth2, columns, RIGHT_IS_WIDE, PRECISION, DEPTH
            )
        else:
            left2 = left2_at + first * depth2
            sums = _product(sums, left2, right2_at, safe_row, column, depth2, columns, RIGHT_IS_WIDE, PRECISION, DEPTH)
    if BIAS:
        bias = tl.load(bias_at + column)
        if SECOND:
            bias += tl.load(bias2_at + column)
        sums += bias[None, :]
    if ADD:
        if not EARLY:
            if STEP > 1:
                other_row = (image * other_height + down // STEP) * other_width + right // STEP
                has = exists & ((down % STEP == 0) & (right % STEP == 0))[:, None]
                add = tl.load(add_at + (other_row[:, None] * columns + column[None, :]), mask=has, other=0)
            else:
                add = tl.load(add_at + at + inside, mask=exists, other=0)
        sums += add.to(tl.float32)
    byte = (tile % across) * (COLUMNS // WIDTH) + tl.arange(0, COLUMNS // WIDTH)
    byte_inside = row[:, None] * (columns // WIDTH) + byte[None, :]
    if RELU:
        stopped = sums <= 0.0  # not NaN, which a loss scaler has to see
        sums = tl.where(stopped, 0.0, sums)
        if KEEP_BITS:
            bit = tl.where(stopped, 0, 1 << (tl.arange(0, COLUMNS) % WIDTH)[None, :])
            bits = tl.sum(tl.reshape(bit, (ROWS, COLUMNS // WIDTH, WIDTH)), axis=2)
            tl.store(bits_at + at // WIDTH + byte_inside, bits.to(tl.uint8), mask=exists)
    if GATE == 1:
        bits = tl.load(gate_at + at // WIDTH + byte_inside, mask=exists, other=0).to(tl.int32)
        passed = (bits[:, :, None] >> tl.arange(0, WIDTH)[None, None, :]) & 1
        # Chosen and not multiplied: an infinite gradient must not become NaN.
        sums = tl.where(tl.reshape(passed, (ROWS, COLUMNS)) != 0, sums, 0.0)
    if GATE == 2:
        value = tl.load(gate_at + at + inside, mask=exists, other=0).to(tl.float32)
        sums = tl.where(value <= 0.0, 0.0, sums)
    tl.store(y_at + at + inside, sums.to(y_at.dtype.element_ty), mask=exists)


@triton.jit
def _product(
    sums, left_at, right_at, row, column, depth, columns, RIGHT_IS_WIDE: tl.constexpr, PRECISION: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Return sums + left[row] @ right[:, column]."""
    inner = tl.arange(0, DEPTH)
    left = row[:, None] * depth + inner[None, :]
    right = inner[:, None] * (columns if RIGHT_IS_WIDE else 1) + column[None, :] * (1 if RIGHT_IS_WIDE else depth)
    for _ in range(0, depth, DEPTH):
        sums = tl.dot(tl.load(left_at + left), tl.load(right_at + right), sums, input_precision=PRECISION)
        left_at += DEPTH
        right_at += DEPTH * columns if RIGHT_IS_WIDE else DEPTH
    return sums


@triton.jit
def gate_kernel(g_at, other_at, gate_at, y_at, count, OTHER: tl.constexpr, BITS: tl.constexpr, VECTORS: tl.constexpr):
    """Write y = gate(g [+ other]) over `count` elements, a multiple of 8 if BITS; the gate as of `product_kernel`."""
    start = tl.program_id(0).to(tl.int64) * (VECTORS * WIDTH)
    vector = tl.arange(0, VECTORS)
    inside = vector[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    exists = inside < count - start
    g = tl.load(g_at + start + inside, mask=exists, other=0).to(tl.float32)
    if OTHER:
        g += tl.load(other_at + start + inside, mask=exists, other=0).to(tl.float32)
    if BITS:
        byte = tl.load(gate_at + start // WIDTH + vector, mask=vector * WIDTH < count - start, other=0).to(tl.int32)
        g = tl.where(((byte[:, None] >> tl.arange(0, WIDTH)[None, :]) & 1) != 0, g, 0.0)
    else:
        value = tl.load(gate_at + start + inside, mask=exists, other=0).to(tl.float32)
        g = tl.where(value <= 0.0, 0.0, g)
    tl.store(y_at + start + inside, g.to(y_at.dtype.element_ty), mask=exists)
