# mypy: ignore-errors
"""The Triton kernels: one pass over the feature map forward, one backward.

Both are bound by memory, so bytes are all that counts. A program takes vectors of 8 elements, one mask byte each. Its
tiles lie a multiple of the channels apart, so that it loads its channels' scale and bias once.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # as decided when this module is imported
# Elements of a vector, and bits of a mask byte.
WIDTH = tl.constexpr(8)


@triton.jit
def forward_kernel(
    x_at, z_at, y_at, mask_at, x_scale_at, x_bias_at, z_scale_at, z_bias_at, count, tiles, pixels,
    CHANNELS: tl.constexpr, CHANNELS_LAST: tl.constexpr, ADD: tl.constexpr, DUAL: tl.constexpr,
    KEEP_MASK: tl.constexpr, VECTORS: tl.constexpr,
):  # fmt: skip
    """Write y = relu(x * x_scale + x_bias [+ z | + z * z_scale + z_bias]) and the mask of the elements that passed.

    Args:
        x_at, z_at, y_at: `count` elements each, in one order of dimensions.
        mask_at: uint8 (ceil(count / 8),); bit i of byte j is element 8 j + i.
        x_scale_at, x_bias_at, z_scale_at, z_bias_at: float32 (CHANNELS,).
        count: elements.
        tiles: of VECTORS * 8 elements, the last one perhaps in part.
        pixels: elements of a channel that lie side by side; not read if CHANNELS_LAST.
        CHANNELS: of the feature map.
        CHANNELS_LAST: whether neighbouring elements are neighbouring channels, or else neighbouring pixels.
        ADD: there is a z.
        DUAL: z has a scale and a bias of its own.
        KEEP_MASK: write the mask.
        VECTORS: of a tile, a power of two. VECTORS * 8 * (number of programs) is a multiple of CHANNELS.
    """
    tile, programs = tl.program_id(0), tl.num_programs(0)
    vectors = tl.arange(0, VECTORS)
    inside = vectors[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    if CHANNELS_LAST:
        channel = _channel_of(tile, inside, pixels, CHANNELS, CHANNELS_LAST, VECTORS)
        x_scale, x_bias = tl.load(x_scale_at + channel), tl.load(x_bias_at + channel)
        if DUAL:
            z_scale, x_bias = tl.load(z_scale_at + channel), x_bias + tl.load(z_bias_at + channel)
    while tile < tiles:
        if not CHANNELS_LAST:
            channel = _channel_of(tile, inside, pixels, CHANNELS, CHANNELS_LAST, VECTORS)
            x_scale, x_bias = tl.load(x_scale_at + channel), tl.load(x_bias_at + channel)
            if DUAL:
                z_scale, x_bias = tl.load(z_scale_at + channel), x_bias + tl.load(z_bias_at + channel)
        start = tile.to(tl.int64) * (VECTORS * WIDTH)
        exists = inside < count - start
        value = tl.load(x_at + start + inside, mask=exists, other=0).to(tl.float32) * x_scale + x_bias
        if ADD:
            z = tl.load(z_at + start + inside, mask=exists, other=0).to(tl.float32)
            value += z * z_scale if DUAL else z
        stopped = value <= 0.0  # not NaN, which a loss scaler has to see
        y = tl.where(stopped, 0.0, value).to(y_at.dtype.element_ty)
        tl.store(y_at + start + inside, y, mask=exists)
        if KEEP_MASK:
            bits = tl.where(stopped, 0, 1 << tl.arange(0, WIDTH)[None, :])
            byte_exists = vectors * WIDTH < count - start
            tl.store(mask_at + start // WIDTH + vectors, tl.sum(bits, axis=1).to(tl.uint8), mask=byte_exists)
        tile += programs


@triton.jit
def backward_kernel(
    dy_at, dy_twin_at, mask_at, dx_at, dz_at, x_scale_at, z_scale_at, count, tiles, pixels,
    CHANNELS: tl.constexpr, CHANNELS_LAST: tl.constexpr, TWIN: tl.constexpr, DUAL: tl.constexpr,
    WANT_DX: tl.constexpr, WANT_DZ: tl.constexpr, VECTORS: tl.constexpr,
):  # fmt: skip
    """Write dx = dy * mask * x_scale and dz = dy * mask [* z_scale], where dy is `dy [+ dy_twin]`.

    Arguments as of `forward_kernel`.
    """
    tile, programs = tl.program_id(0), tl.num_programs(0)
    vectors = tl.arange(0, VECTORS)
    inside = vectors[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    if CHANNELS_LAST:
        channel = _channel_of(tile, inside, pixels, CHANNELS, CHANNELS_LAST, VECTORS)
        x_scale = tl.load(x_scale_at + channel)
        if DUAL:
            z_scale = tl.load(z_scale_at + channel)
    while tile < tiles:
        if not CHANNELS_LAST:
            channel = _channel_of(tile, inside, pixels, CHANNELS, CHANNELS_LAST, VECTORS)
            x_scale = tl.load(x_scale_at + channel)
            if DUAL:
                z_scale = tl.load(z_scale_at + channel)
        start = tile.to(tl.int64) * (VECTORS * WIDTH)
        exists = inside < count - start
        byte = tl.load(mask_at + start // WIDTH + vectors, mask=vectors * WIDTH < count - start, other=0).to(tl.int32)
        gradient = tl.load(dy_at + start + inside, mask=exists, other=0).to(tl.float32)
        if TWIN:
            gradient += tl.load(dy_twin_at + start + inside, mask=exists, other=0).to(tl.float32)
        passed = (byte[:, None] >> tl.arange(0, WIDTH)[None, :]) & 1
        gradient = tl.where(passed != 0, gradient, 0.0)  # not a product: an infinite gradient must not become NaN
        if WANT_DX:
            tl.store(dx_at + start + inside, (gradient * x_scale).to(dx_at.dtype.element_ty), mask=exists)
        if WANT_DZ:
            dz = gradient * z_scale if DUAL else gradient
            tl.store(dz_at + start + inside, dz.to(dz_at.dtype.element_ty), mask=exists)
        tile += programs


@triton.jit
def _channel_of(tile, inside, pixels, CHANNELS: tl.constexpr, CHANNELS_LAST: tl.constexpr, VECTORS: tl.constexpr):
    """Return the channel of each element of a tile, (VECTORS, 8)."""
    start = tile.to(tl.int64) * (VECTORS * WIDTH)
    if CHANNELS_LAST:
        channel = ((start % CHANNELS).to(tl.int32) + inside) % CHANNELS
        if CHANNELS % 8 == 0:
            # A vector's channels are neighbours, which the compiler can't see behind the remainder.
            channel = tl.multiple_of(tl.max_contiguous(channel, [1, WIDTH]), [1, WIDTH])
    else:
        # One division in 64 bits for the tile, one in 32 bits for each element.
        channel = (
            (start // pixels % CHANNELS).to(tl.int32) + ((start % pixels).to(tl.int32) + inside) // pixels
        ) % CHANNELS
    return channel
