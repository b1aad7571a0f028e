"""Random numbers of one visit of a sample, as a pure function of (seed, epoch, index).

Whatever draws its augmentation from them gives the same batch for any number of workers, any batch size, any loader,
and after a resume. The hash is SplitMix64's (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
2014): making a NumPy generator for each sample takes longer than copying a small image.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fasttrain.order import SampleKey

MASK64 = 2**64 - 1
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

States = NDArray[np.uint64]


def sample_bits(seed: int, epoch: int, index: int) -> int:
    """Return 64 random bits."""
    state = 0
    for part in (seed, epoch, index):
        state = ((state ^ part) + STEP) & MASK64
        state = ((state ^ state >> 30) * FIRST) & MASK64
        state = ((state ^ state >> 27) * SECOND) & MASK64
        state ^= state >> 31
    return state


def sample_states(seed: int, keys: Sequence[SampleKey]) -> States:
    """Return `sample_bits` of each visit, (len(keys),), all at once."""
    table = np.array(keys, dtype=np.int64).reshape(-1, 2).astype(np.uint64)
    state = np.zeros(len(table), dtype=np.uint64)
    for part in (np.uint64(seed & MASK64), table[:, 0], table[:, 1]):
        state = _mixed(state ^ part)
    return state


def uniforms(states: States, count: int) -> NDArray[np.float64]:
    """Return `count` numbers in [0, 1) for each state, (len(states), count)."""
    numbers = _mixed(states[:, None] ^ np.arange(1, count + 1, dtype=np.uint64))
    return (numbers >> np.uint64(11)).astype(np.float64) * 2.0**-53


def fair_coins(states: States) -> NDArray[np.int32]:
    """Return 0 or 1 for each state, independent of its `uniforms`."""
    return (states >> np.uint64(63)).astype(np.int32)


def _mixed(state: States) -> States:
    state = state + np.uint64(STEP)  # sums and products wrap around at 64 bits, as the hash wants
    state = (state ^ state >> np.uint64(30)) * np.uint64(FIRST)
    state = (state ^ state >> np.uint64(27)) * np.uint64(SECOND)
    return state ^ state >> np.uint64(31)
