# mypy: ignore-errors
"""The Triton kernels of the backward: one pass for two sums by channel, one for the gradients of the inputs.

With g the gradient behind the ReLU, d = x - mean, and n rows:

    dbias = sum g    dweight = sum(g d) / std    dx = weight / std * (g - sum g / n - d * sum(g d) / (n std^2))

Common arguments as in `forward_kernels`, and of the map:

    dy_at, twin_at   gradients of the output, and of its twin if TWIN, which are added
    x_at, z_at       what was normalized; z if DUAL
    mask_at          of `normalize_kernel`, read if BITS
    stats_at, z_stats_at   of `finish_statistics_kernel`
    AGAIN            what passed the ReLU is computed again, by the forward's own operations
"""

import triton
import triton.language as tl

from fasttrain.callbacks.bn_relu.forward_kernels import SIZES
from fasttrain.callbacks.bn_relu.tile import (
    WIDTH,
    channels_of,
    of_channel,
    place,
    store_sums,
    summed,
    vectors_of,
    within,
)


@triton.jit
def passed_gradient(
    dy_at, twin_at, mask_at, offset, byte_offset, reads, byte_exists, value, TWIN: tl.constexpr, BITS: tl.constexpr,
    AGAIN: tl.constexpr,
):  # fmt: skip
    """Return the gradient behind the ReLU in float32. `value` is what the ReLU saw, used if AGAIN."""
    gradient = tl.load(dy_at + offset, mask=reads, other=0).to(tl.float32)
    if TWIN:
        gradient += tl.load(twin_at + offset, mask=reads, other=0).to(tl.float32)
    # Not by products: an infinite gradient must not become NaN.
    if AGAIN:
        gradient = tl.where(value <= 0.0, 0.0, gradient)
    if BITS:
        byte = tl.load(mask_at + byte_offset, mask=byte_exists, other=0).to(tl.int32)
        gradient = tl.where((byte >> tl.arange(0, WIDTH)[None, :]) & 1 != 0, gradient, 0.0)
    return gradient


@triton.jit(do_not_specialize=SIZES)
def gradient_sums_kernel(
    dy_at, twin_at, x_at, z_at, mask_at, passed_at, partial_at, stats_at, z_stats_at, rows, channels, tiles,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, WHOLE: tl.constexpr, ALIGNED: tl.constexpr, STAGES: tl.constexpr,
    TWIN: tl.constexpr, BITS: tl.constexpr, AGAIN: tl.constexpr, DUAL: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """Write each program's sums of g, of g d, and of g d of z if DUAL, to partial (programs, 2 or 3, channels).

    If WRITE, g is written to `passed_at` too: it is the gradient of what was added, and all that the next pass needs.
    """
    if ALIGNED:
        channels = channels // 8 * 8  # the compiler sees that 8 divides it
    program, programs, block = place(channels, GROUPS)
    row, group, channel = vectors_of(block, ROWS, GROUPS)
    there = within(group, channel, channels, ALIGNED)
    inside = row * channels + channel
    bytes_of_row = tl.cdiv(channels, WIDTH)
    mean = of_channel(stats_at, channel, there, WHOLE)
    if AGAIN:
        scale = of_channel(stats_at + 2 * channels, channel, there, WHOLE)
        shift = of_channel(stats_at + 3 * channels, channel, there, WHOLE)
    if DUAL:
        z_mean = of_channel(z_stats_at, channel, there, WHOLE)
        z_products = tl.zeros((ROWS * GROUPS, WIDTH), tl.float32)
    sums = tl.zeros((ROWS * GROUPS, WIDTH), tl.float32)
    products = tl.zeros((ROWS * GROUPS, WIDTH), tl.float32)
    for tile in tl.range(program, tiles, programs, num_stages=STAGES):
        start = tl.cast(tile, tl.int64) * ROWS
        offset = start * channels + inside
        exists = row < rows - tile * ROWS
        reads = exists if WHOLE else exists & there
        difference = tl.load(x_at + offset, mask=reads, other=0).to(tl.float32) - mean
        value = tl.fma(difference, scale, shift) if AGAIN else difference
        gradient = passed_gradient(
            dy_at, twin_at, mask_at, offset, start * bytes_of_row + row * bytes_of_row + group, reads,
            exists & (group < bytes_of_row), value, TWIN, BITS, AGAIN,
        )  # fmt: skip
        if WRITE:
            written = gradient.to(passed_at.dtype.element_ty)
            tl.store(passed_at + offset, written, mask=reads)
            gradient = written.to(tl.float32)  # what the next pass will read
        sums += gradient
        products += gradient * difference
        if DUAL:
            z_products += gradient * (tl.load(z_at + offset, mask=reads, other=0).to(tl.float32) - z_mean)
    at = partial_at + program.to(tl.int64) * (3 if DUAL else 2) * channels
    channel = channels_of(block, GROUPS)
    store_sums(summed(sums, ROWS, GROUPS), at, channel, channels, WHOLE)
    store_sums(summed(products, ROWS, GROUPS), at + channels, channel, channels, WHOLE)
    if DUAL:
        store_sums(summed(z_products, ROWS, GROUPS), at + 2 * channels, channel, channels, WHOLE)


@triton.jit(do_not_specialize=SIZES)
def finish_gradients_kernel(
    partial_at, result_at, stats_at, z_stats_at, rows, channels, programs, DUAL: tl.constexpr, PARTIALS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write result (1 + DUAL, 4, channels): dbias, dweight, and a and b of dx = g * scale + d * a + b."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < channels
    sums = tl.zeros((PARTIALS, CHANNELS), tl.float32)
    products = tl.zeros((PARTIALS, CHANNELS), tl.float32)
    z_products = tl.zeros((PARTIALS, CHANNELS), tl.float32)
    for start in range(0, programs, PARTIALS):
        program = start + tl.arange(0, PARTIALS)[:, None]
        reads = (program < programs) & exists[None, :]
        at = partial_at + program.to(tl.int64) * (3 if DUAL else 2) * channels + channel[None, :]
        sums += tl.load(at, mask=reads, other=0)
        products += tl.load(at + channels, mask=reads, other=0)
        if DUAL:
            z_products += tl.load(at + 2 * channels, mask=reads, other=0)
    rows = tl.cast(rows, tl.float32)
    total = tl.sum(sums, axis=0)
    _write_result(result_at, stats_at, total, tl.sum(products, axis=0), rows, channel, channels, exists)
    if DUAL:
        at = result_at + 4 * channels
        _write_result(at, z_stats_at, total, tl.sum(z_products, axis=0), rows, channel, channels, exists)


@triton.jit
def _write_result(result_at, stats_at, total, product, rows, channel, channels, exists):
    inverse = tl.load(stats_at + channels + channel, mask=exists, other=0)
    scale = tl.load(stats_at + 2 * channels + channel, mask=exists, other=0)
    dweight = product * inverse
    tl.store(result_at + channel, total, mask=exists)
    tl.store(result_at + channels + channel, dweight, mask=exists)
    tl.store(result_at + 2 * channels + channel, -scale * inverse * dweight / rows, mask=exists)
    tl.store(result_at + 3 * channels + channel, -scale * total / rows, mask=exists)


@triton.jit(do_not_specialize=SIZES)
def input_gradient_kernel(
    dy_at, twin_at, x_at, z_at, mask_at, dx_at, dz_at, result_at, stats_at, z_stats_at, rows, channels, tiles,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, WHOLE: tl.constexpr, ALIGNED: tl.constexpr, STAGES: tl.constexpr,
    TWIN: tl.constexpr, BITS: tl.constexpr, AGAIN: tl.constexpr, DUAL: tl.constexpr, WANT_DX: tl.constexpr,
    WANT_DZ: tl.constexpr,
):  # fmt: skip
    """Write dx, and dz of the second normalization. `result_at` is of `finish_gradients_kernel`.

    From the map's end to its beginning, as `normalize_kernel`.
    """
    if ALIGNED:
        channels = channels // 8 * 8  # the compiler sees that 8 divides it
    program, programs, block = place(channels, GROUPS)
    row, group, channel = vectors_of(block, ROWS, GROUPS)
    there = within(group, channel, channels, ALIGNED)
    inside = row * channels + channel
    bytes_of_row = tl.cdiv(channels, WIDTH)
    if WANT_DX:
        mean = of_channel(stats_at, channel, there, WHOLE)
        scale = of_channel(stats_at + 2 * channels, channel, there, WHOLE)
        a = of_channel(result_at + 2 * channels, channel, there, WHOLE)
        b = of_channel(result_at + 3 * channels, channel, there, WHOLE)
        if AGAIN:
            shift = of_channel(stats_at + 3 * channels, channel, there, WHOLE)
    if WANT_DZ:
        z_mean = of_channel(z_stats_at, channel, there, WHOLE)
        z_scale = of_channel(z_stats_at + 2 * channels, channel, there, WHOLE)
        z_a = of_channel(result_at + 6 * channels, channel, there, WHOLE)
        z_b = of_channel(result_at + 7 * channels, channel, there, WHOLE)
    for counted in tl.range(program, tiles, programs, num_stages=STAGES):
        tile = tiles - 1 - counted
        start = tl.cast(tile, tl.int64) * ROWS
        offset = start * channels + inside
        exists = row < rows - tile * ROWS
        reads = exists if WHOLE else exists & there
        value = tl.zeros((ROWS * GROUPS, WIDTH), tl.float32)
        if WANT_DX:
            difference = tl.load(x_at + offset, mask=reads, other=0).to(tl.float32) - mean
            if AGAIN:
                value = tl.fma(difference, scale, shift)
        gradient = passed_gradient(
            dy_at, twin_at, mask_at, offset, start * bytes_of_row + row * bytes_of_row + group, reads,
            exists & (group < bytes_of_row), value, TWIN, BITS, AGAIN,
        )  # fmt: skip
        if WANT_DX:
            dx = gradient * scale + (difference * a + b)
            tl.store(dx_at + offset, dx.to(dx_at.dtype.element_ty), mask=reads)
        if WANT_DZ:
            z = tl.load(z_at + offset, mask=reads, other=0).to(tl.float32)
            dz = gradient * z_scale + ((z - z_mean) * z_a + z_b)
            tl.store(dz_at + offset, dz.to(dz_at.dtype.element_ty), mask=reads)
