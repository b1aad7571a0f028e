# mypy: ignore-errors
"""The Triton kernel: a folded normalization, ReLU and max-pooling of 3 x 3 at stride 2, in one pass over a map."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # as decided when this module is imported


@triton.jit
def pool_kernel(
    x_at, scale_at, bias_at, y_at, height, width, rows, columns, CHANNELS: tl.constexpr, PIXELS: tl.constexpr
):  # fmt: skip
    """Write max over 3 x 3 of relu(x * scale + bias), each program some pixels of one row and all channels.

    The ReLU's zero is the maximum's first value: what lies outside of the map changes nothing. Rounding once, after
    the maximum, gives what rounding before it would, because it keeps the order.

    Args:
        x_at: (images, height, width, CHANNELS), contiguous.
        scale_at, bias_at: float32 (CHANNELS,).
        y_at: (images, rows, columns, CHANNELS), contiguous, written.
        height, width: of x.
        rows, columns: of y: half of them, rounded up.
        CHANNELS: a power of two.
        PIXELS: of a program, a power of two.
    """
    program = tl.program_id(0)
    tiles = tl.cdiv(columns, PIXELS)
    column = (program % tiles) * PIXELS + tl.arange(0, PIXELS)
    row = (program // tiles) % rows
    image = (program // tiles // rows).to(tl.int64)
    channel = tl.arange(0, CHANNELS)
    scale, bias = tl.load(scale_at + channel)[None, :], tl.load(bias_at + channel)[None, :]
    best = tl.zeros([PIXELS, CHANNELS], tl.float32)
    for down in tl.static_range(3):
        for right in tl.static_range(3):
            y, x = 2 * row + down - 1, 2 * column + right - 1
            inside = ((y >= 0) & (y < height) & (x >= 0) & (x < width) & (column < columns))[:, None]
            at = (image * height + y) * width * CHANNELS + x[:, None] * CHANNELS + channel[None, :]
            value = tl.load(x_at + at, mask=inside, other=0.0).to(tl.float32) * scale + bias
            best = tl.where(inside, tl.maximum(best, value, propagate_nan=tl.PropagateNan.ALL), best)
    at = (image * rows + row) * columns * CHANNELS + column[:, None] * CHANNELS + channel[None, :]
    tl.store(y_at + at, best.to(y_at.dtype.element_ty), mask=(column < columns)[:, None])
