"""Random numbers of one visit of a sample, as a pure function of (seed, epoch, index).

Whatever draws its augmentation from them gives the same batch for any number of workers, any batch size, and after a
resume. The hash is SplitMix64's (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014);
making a NumPy generator for each sample takes longer than copying a small image.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fasttrain.order import SampleKey

MASK64 = 2**64 - 1
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def sample_bits(seed: int, epoch: int, index: int) -> int:
    """Return 64 random bits."""
    state = 0
    for part in (seed, epoch, index):
        state = ((state ^ part) + STEP) & MASK64
        state = ((state ^ state >> 30) * FIRST) & MASK64
        state = ((state ^ state >> 27) * SECOND) & MASK64
        state ^= state >> 31
    return state


def sample_uniforms(seed: int, keys: Sequence[SampleKey], count: int) -> NDArray[np.float64]:
    """Return `count` numbers in [0, 1) for each visit, (len(keys), count)."""
    first = np.array([sample_bits(seed, epoch, index) for epoch, index in keys], dtype=np.uint64)
    # The products wrap around at 64 bits, as the hash wants.
    state = first[:, None] + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(STEP)
    state = (state ^ state >> np.uint64(30)) * np.uint64(FIRST)
    state = (state ^ state >> np.uint64(27)) * np.uint64(SECOND)
    state ^= state >> np.uint64(31)
    uniforms: NDArray[np.float64] = (state >> np.uint64(11)) * 2.0**-53
    return uniforms
