# mypy: ignore-errors
"""How all kernels of the room see a channels_last map: as a matrix of (rows, channels), rows being N * H * W.

A tile is ROWS x (GROUPS * 8) of it, held as vectors of 8 neighbouring channels, (ROWS * GROUPS, 8): one 16-byte access
in 16 bits, and one byte of a mask. A program keeps its channels and goes down the rows in steps of all programs, so
that they sweep over the map together and load what belongs to a channel once.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # as decided when this module is imported
# Channels of a vector, and bits of a mask byte.
WIDTH = tl.constexpr(8)


@triton.jit
def place(channels, GROUPS: tl.constexpr):
    """Return this program's number among those of its channels, how many they are, and its block of channels."""
    blocks = tl.cdiv(channels, GROUPS * WIDTH)
    return tl.program_id(0) // blocks, tl.num_programs(0) // blocks, tl.program_id(0) % blocks


@triton.jit
def vectors_of(block, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Return row, (V, 1), group of 8 channels, (V, 1), and channel, (V, 8), of each vector in a tile."""
    vector = tl.arange(0, ROWS * GROUPS)[:, None]
    group = block * GROUPS + vector % GROUPS
    return vector // GROUPS, group, group * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def within(group, channel, channels, ALIGNED: tl.constexpr):
    """Return whether there is such a channel: (V, 1) if 8 divides them, so that a vector is loaded whole, or (V, 8)."""
    return group * WIDTH < channels if ALIGNED else channel < channels


@triton.jit
def of_channel(values_at, channel, there, WHOLE: tl.constexpr):
    """Return float32 values of each channel of a tile, (V, 8). WHOLE: no tile goes beyond the last channel."""
    return tl.load(values_at + channel) if WHOLE else tl.load(values_at + channel, mask=there, other=0)


@triton.jit
def summed(values, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Return the sums of a tile by channel, (GROUPS, 8)."""
    return tl.sum(tl.reshape(values, (ROWS, GROUPS, WIDTH)), axis=0)


@triton.jit
def channels_of(block, GROUPS: tl.constexpr):
    """Return the channel of each of a tile's sums, (GROUPS, 8)."""
    return (block * GROUPS + tl.arange(0, GROUPS)[:, None]) * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def store_sums(sums, at, channel, channels, WHOLE: tl.constexpr):
    """Write (GROUPS, 8) sums to a row of partial results."""
    if WHOLE:
        tl.store(at + channel, sums)
    else:
        tl.store(at + channel, sums, mask=channel < channels)


@triton.jit
def rows_taken(program, programs, tiles, rows, ROWS: tl.constexpr):
    """Return how many rows a program takes, of all its tiles."""
    last = (tiles - 1 - program) // programs  # of its tiles, counted from 0
    surplus = tl.where(program + last * programs == tiles - 1, tiles * ROWS - rows, 0)
    return (last + 1) * ROWS - surplus
