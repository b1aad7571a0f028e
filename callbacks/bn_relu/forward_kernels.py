# mypy: ignore-errors
"""The Triton kernels of the forward: statistics in two stages, then one pass that normalizes, adds and clips.

Common arguments: `rows` and `channels` of the map, `tiles` of ROWS rows each, the tile's shape ROWS and GROUPS, WHOLE,
that no tile goes beyond the last channel, and ALIGNED, that 8 divides the channels. See `tile`.
"""

import triton
import triton.language as tl

from fasttrain.callbacks.bn_relu.tile import (
    WIDTH,
    channels_of,
    of_channel,
    place,
    rows_taken,
    store_sums,
    summed,
    vectors_of,
    within,
)

# Nothing is gained by compiling again for sizes that 16 divides.
SIZES = ("rows", "tiles", "programs")


@triton.jit(do_not_specialize=SIZES)
def statistics_kernel(
    x_at, partial_at, rows, channels, tiles, ROWS: tl.constexpr, GROUPS: tl.constexpr, WHOLE: tl.constexpr,
    ALIGNED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write each program's mean and sum of squared deviations from it, by channel, to partial (programs, 2, channels).

    Sums are of differences to one value of the program's own, so that a mean far from zero costs no digits.
    """
    if ALIGNED:
        channels = channels // 8 * 8  # the compiler sees that 8 divides it
    program, programs, block = place(channels, GROUPS)
    row, group, channel = vectors_of(block, ROWS, GROUPS)
    there = within(group, channel, channels, ALIGNED)
    inside = row * channels + channel
    first_row_at = x_at + program.to(tl.int64) * ROWS * channels
    shift = of_channel(first_row_at, channel, there, WHOLE).to(tl.float32)
    sums = tl.zeros((ROWS * GROUPS, WIDTH), tl.float32)
    squares = tl.zeros((ROWS * GROUPS, WIDTH), tl.float32)
    for tile in tl.range(program, tiles, programs, num_stages=STAGES):
        exists = row < rows - tile * ROWS
        reads = exists if WHOLE else exists & there
        x = tl.load(x_at + tl.cast(tile, tl.int64) * ROWS * channels + inside, mask=reads, other=0).to(tl.float32)
        difference = tl.where(exists, x - shift, 0.0)
        sums += difference
        squares += difference * difference
    count = rows_taken(program, programs, tiles, rows, ROWS).to(tl.float32)
    channel = channels_of(block, GROUPS)
    shift = of_channel(first_row_at, channel, channel < channels, WHOLE).to(tl.float32)
    total, square = summed(sums, ROWS, GROUPS), summed(squares, ROWS, GROUPS)
    at = partial_at + program.to(tl.int64) * 2 * channels
    store_sums(shift + total / count, at, channel, channels, WHOLE)
    store_sums(tl.maximum(square - total * total / count, 0.0), at + channels, channel, channels, WHOLE)


@triton.jit(do_not_specialize=SIZES)
def finish_statistics_kernel(
    partial_at, stats_at, weight_at, bias_at, running_mean_at, running_var_at, tracked_at, rows, channels, tiles,
    programs, momentum, eps, ROWS: tl.constexpr, AFFINE: tl.constexpr, UPDATE: tl.constexpr, COUNT: tl.constexpr,
    CUMULATIVE: tl.constexpr, PARTIALS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write stats (4, channels): mean, 1 / sqrt(var + eps), that times the weight, and the bias; update the norm's.

    Args:
        partial_at: of `statistics_kernel`, (programs, 2, channels). Combined by Chan, Golub and LeVeque's formula.
        tracked_at: int64, the number of batches seen.
        momentum: of the running statistics, if not CUMULATIVE; the variance among them is the unbiased one.
        UPDATE: there are running statistics to update.
        COUNT: add one to `tracked_at`.
        CUMULATIVE: the momentum is one over the batches seen, this one among them and counted already.
        PARTIALS, CHANNELS: of the partial results that are taken at once.
    """
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < channels
    first = tl.load(partial_at + channel, mask=exists, other=0)
    sums = tl.zeros((PARTIALS, CHANNELS), tl.float32)
    squares = tl.zeros((PARTIALS, CHANNELS), tl.float32)
    for start in range(0, programs, PARTIALS):
        program = start + tl.arange(0, PARTIALS)[:, None]
        reads = (program < programs) & exists[None, :]
        at = partial_at + program.to(tl.int64) * 2 * channels + channel[None, :]
        count = rows_taken(program, programs, tiles, rows, ROWS).to(tl.float32)
        difference = tl.where(reads, tl.load(at, mask=reads, other=0) - first[None, :], 0.0)
        sums += count * difference
        squares += tl.where(reads, tl.load(at + channels, mask=reads, other=0) + count * difference * difference, 0.0)
    rows = tl.cast(rows, tl.float32)
    total = tl.sum(sums, axis=0)
    deviations = tl.maximum(tl.sum(squares, axis=0) - total * total / rows, 0.0)
    mean, variance = first + total / rows, deviations / rows
    inverse = 1.0 / tl.sqrt_rn(variance + eps)
    scale = inverse
    shift = tl.zeros((CHANNELS,), tl.float32)
    if AFFINE:
        scale = inverse * tl.load(weight_at + channel, mask=exists, other=0)
        shift = tl.load(bias_at + channel, mask=exists, other=0)
    tl.store(stats_at + channel, mean, mask=exists)
    tl.store(stats_at + channels + channel, inverse, mask=exists)
    tl.store(stats_at + 2 * channels + channel, scale, mask=exists)
    tl.store(stats_at + 3 * channels + channel, shift, mask=exists)
    if CUMULATIVE:
        momentum = 1.0 / tl.load(tracked_at).to(tl.float32)
    if UPDATE:
        old_mean = tl.load(running_mean_at + channel, mask=exists, other=0)
        old_var = tl.load(running_var_at + channel, mask=exists, other=0)
        tl.store(running_mean_at + channel, old_mean * (1 - momentum) + mean * momentum, mask=exists)
        unbiased = deviations / (rows - 1)
        tl.store(running_var_at + channel, old_var * (1 - momentum) + unbiased * momentum, mask=exists)
    if COUNT:  # noqa: SIM102 - one is known to the compiler, the other is not
        if tl.program_id(0) == 0:
            tl.store(tracked_at, tl.load(tracked_at) + 1)


@triton.jit(do_not_specialize=SIZES)
def normalize_kernel(
    x_at, z_at, y_at, mask_at, stats_at, z_stats_at, rows, channels, tiles, ROWS: tl.constexpr, GROUPS: tl.constexpr,
    WHOLE: tl.constexpr, ALIGNED: tl.constexpr, STAGES: tl.constexpr, RELU: tl.constexpr, ADD: tl.constexpr,
    DUAL: tl.constexpr, KEEP_MASK: tl.constexpr,
):  # fmt: skip
    """Write y = relu(norm(x) [+ z | + norm(z)]), or without the ReLU, and the mask of the elements that passed.

    From the map's end to its beginning, because the end is what the pass before has left in the cache.

    Args:
        x_at, z_at, y_at: (rows, channels), of any floating type each.
        mask_at: uint8 (rows, ceil(channels / 8)); bit i of byte j is channel 8 j + i. Written if KEEP_MASK.
        stats_at, z_stats_at: of `finish_statistics_kernel`. The second one is read if DUAL.
    """
    if ALIGNED:
        channels = channels // 8 * 8  # the compiler sees that 8 divides it
    program, programs, block = place(channels, GROUPS)
    row, group, channel = vectors_of(block, ROWS, GROUPS)
    there = within(group, channel, channels, ALIGNED)
    inside = row * channels + channel
    bytes_of_row = tl.cdiv(channels, WIDTH)
    mean = of_channel(stats_at, channel, there, WHOLE)
    scale = of_channel(stats_at + 2 * channels, channel, there, WHOLE)
    shift = of_channel(stats_at + 3 * channels, channel, there, WHOLE)
    if DUAL:
        z_mean = of_channel(z_stats_at, channel, there, WHOLE)
        z_scale = of_channel(z_stats_at + 2 * channels, channel, there, WHOLE)
        shift += of_channel(z_stats_at + 3 * channels, channel, there, WHOLE)
    for counted in tl.range(program, tiles, programs, num_stages=STAGES):
        tile = tiles - 1 - counted
        start = tl.cast(tile, tl.int64) * ROWS
        exists = row < rows - tile * ROWS
        reads = exists if WHOLE else exists & there
        x = tl.load(x_at + start * channels + inside, mask=reads, other=0).to(tl.float32)
        value = tl.fma(x - mean, scale, shift)  # the backward does the same, to the last bit
        if ADD:
            z = tl.load(z_at + start * channels + inside, mask=reads, other=0).to(tl.float32)
            value += (z - z_mean) * z_scale if DUAL else z
        if RELU:
            stopped = value <= 0.0  # not NaN, which a loss scaler has to see
            value = tl.where(stopped, 0.0, value)
        tl.store(y_at + start * channels + inside, value.to(y_at.dtype.element_ty), mask=reads)
        if KEEP_MASK:
            bits = tl.sum(tl.where(stopped, 0, 1 << tl.arange(0, WIDTH)[None, :]), axis=1, keep_dims=True)
            at = mask_at + start * bytes_of_row + row * bytes_of_row + group
            tl.store(at, bits.to(tl.uint8), mask=exists & (group < bytes_of_row))
