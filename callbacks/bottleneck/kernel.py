# mypy: ignore-errors
"""The Triton kernels: a matrix product that goes back through a 1x1 convolution, and passes that add, gate and scale.

A 1x1 convolution over a channels_last map is a product of (pixels, channels) matrices. With few channels, what moves
through memory is the gate, the residual and the result, and a product is worth its while if these keep coming. So a
program holds its weights and goes over many tiles of pixels, and the next tiles are fetched during the present one.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # as decided when this module is imported


# Sizes that no vector depends on: without a kernel of its own for each kind.
@triton.jit(do_not_specialize=["rows", "tiles"])
def product_kernel(
    left_at, right_at, add_at, gate_at, y_at, rows, tiles, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
    ADD: tl.constexpr, GATE: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write y = gate(left @ right [+ add]).

    Args:
        left_at: (rows, DEPTH).
        right_at: (DEPTH, COLUMNS).
        add_at: (rows, COLUMNS), if ADD.
        gate_at: (rows, COLUMNS), if GATE: y passes where it is positive, and is 0 elsewhere.
        y_at: (rows, COLUMNS).
        rows: how many there are.
        tiles: ceil(rows / TILE_ROWS). Programs, a multiple of COLUMNS / TILE_COLUMNS, deal them out in turn.
        DEPTH: a power of two, 16 or more.
        TILE_ROWS, TILE_COLUMNS: of a tile of y; the second divides COLUMNS.
        STAGES: tiles under way.
    """
    across: tl.constexpr = COLUMNS // TILE_COLUMNS
    # Neighbours share a block of rows, which comes from memory once.
    column = (tl.program_id(0) % across) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    row, inner = tl.arange(0, TILE_ROWS), tl.arange(0, DEPTH)
    right = tl.load(right_at + (inner[:, None] * COLUMNS + column[None, :]))
    # Offsets within a tile are of 32 bits, which saves registers.
    left_inside = row[:, None] * DEPTH + inner[None, :]
    inside = row[:, None] * COLUMNS + column[None, :]
    for tile in tl.range(tl.program_id(0) // across, tiles, tl.num_programs(0) // across, num_stages=STAGES):
        first = tl.cast(tile, tl.int64) * TILE_ROWS
        exists = (row < rows - first)[:, None]
        left = tl.load(left_at + first * DEPTH + left_inside, mask=exists, other=0)
        sums = tl.dot(left, right)
        if ADD:
            sums += tl.load(add_at + first * COLUMNS + inside, mask=exists, other=0).to(tl.float32)
        if GATE:
            # Chosen and not multiplied: an infinite gradient must not become NaN.
            gate = tl.load(gate_at + first * COLUMNS + inside, mask=exists, other=0).to(tl.float32)
            sums = tl.where(gate <= 0.0, 0.0, sums)  # not where it is NaN, which a loss scaler has to see
        tl.store(y_at + first * COLUMNS + inside, sums.to(y_at.dtype.element_ty), mask=exists)


@triton.jit
def gate_kernel(
    g_at, other_at, gate_at, y_at, count, OTHER: tl.constexpr, GATE: tl.constexpr, ELEMENTS: tl.constexpr
):  # fmt: skip
    """Write y = gate(g [+ other]) over `count` elements; the gate as of `product_kernel`."""
    start = tl.program_id(0).to(tl.int64) * ELEMENTS
    inside = tl.arange(0, ELEMENTS)
    exists = inside < count - start
    g = tl.load(g_at + start + inside, mask=exists, other=0).to(tl.float32)
    if OTHER:
        g += tl.load(other_at + start + inside, mask=exists, other=0).to(tl.float32)
    if GATE:
        gate = tl.load(gate_at + start + inside, mask=exists, other=0).to(tl.float32)
        g = tl.where(gate <= 0.0, 0.0, g)
    tl.store(y_at + start + inside, g.to(y_at.dtype.element_ty), mask=exists)


@triton.jit
def scale_kernel(weight_at, scale_at, y_at, count, per_channel, ELEMENTS: tl.constexpr):
    """Write y = weight * scale by output channel, of which each has `per_channel` of the `count` elements in turn."""
    element = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    exists = element < count
    scale = tl.load(scale_at + element // per_channel, mask=exists, other=0)
    weight = tl.load(weight_at + element, mask=exists, other=0).to(tl.float32)
    tl.store(y_at + element, (weight * scale).to(y_at.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["pixels", "height", "width", "small_height", "small_width"])
def add_kernel(
    small_at, y_at, pixels, channels, height, width, small_height, small_width, STEP: tl.constexpr,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Add a small map to y where a convolution of stride STEP looked at it: at every STEP-th pixel, both ways.

    Args:
        small_at: (images, small_height, small_width, channels), `pixels` in all.
        y_at: (images, height, width, channels).
        PIXELS, CHANNELS: of a tile.
    """
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    line = pixel // small_width
    image = line // small_height
    at = (image * height + line % small_height * STEP) * width + pixel % small_width * STEP
    exists = (pixel < pixels)[:, None] & (channel < channels)[None, :]
    small = small_at + pixel.to(tl.int64)[:, None] * channels + channel[None, :]
    y = y_at + at.to(tl.int64)[:, None] * channels + channel[None, :]
    total = tl.load(y, mask=exists, other=0).to(tl.float32) + tl.load(small, mask=exists, other=0).to(tl.float32)
    tl.store(y, total.to(y_at.dtype.element_ty), mask=exists)
