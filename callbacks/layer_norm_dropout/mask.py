"""Which elements a dropout keeps, as a function of a seed, so that the backward finds it again and nothing is stored.

Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) makes 128 random bits of a counter
and a key. The key is the seed. The counter is (group, row, 0, 0), where a group is 8 neighbours of a row; they get 16
bits each, and an element is kept if its bits, as a number, reach p * 65536. So p is rounded to a multiple of 2^-16.
Of the rounds, 7 pass all of the paper's tests (BigCrush); 10 are its margin.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

GROUP = 8
ROUNDS = 7
_BITS = 16
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_32_BITS = 0xFFFFFFFF


def draw_seed(device: torch.device | str) -> Tensor:
    """Return int64 (1,), drawn on the device from PyTorch's default generator for it.

    A captured CUDA graph draws another one at each replay, `torch.manual_seed` makes it the same again, and activation
    checkpointing with preserve_rng_state draws the same one twice: all of this is the generator's doing.
    """
    return torch.empty(1, dtype=torch.int64, device=device).random_()


def threshold(p: float) -> int:
    """Return the number that an element's 16 bits must reach to be kept: 0 keeps all, 65536 none."""
    return round(p * (1 << _BITS))


def keep_mask(seed: Tensor, shape: Sequence[int], p: float, rounds: int = ROUNDS) -> Tensor:
    """Return the mask of a call with this seed, bool of `shape`, whose last dimension is the normalized one.

    Slow: it is for tests, and for looking at what a call has dropped.
    """
    *outer, hidden = shape
    rows = torch.Size(outer).numel()
    words = torch.stack(_philox(seed, -(-hidden // GROUP), rows, rounds), dim=-1)
    halves = torch.stack([words & (2**_BITS - 1), words >> _BITS], dim=-1)
    return (halves.flatten(1)[:, :hidden] >= threshold(p)).reshape(tuple(shape))


def _philox(seed: Tensor, groups: int, rows: int, rounds: int) -> list[Tensor]:
    """Return four words for each counter, int64 (rows, groups) with values below 2^32."""
    counters = torch.zeros(4, rows, groups, dtype=torch.int64, device=seed.device)
    counters[0] = torch.arange(groups, device=seed.device)
    counters[1] = torch.arange(rows, device=seed.device)[:, None]
    c0, c1, c2, c3 = counters
    key0, key1 = seed & _32_BITS, (seed >> 32) & _32_BITS
    for _ in range(rounds):
        # The products wrap around in 64 bits, which leaves all bits of both halves right.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = _high(product1) ^ c1 ^ key0, _high(product0) ^ c3 ^ key1
        c1, c3 = product1 & _32_BITS, product0 & _32_BITS
        key0, key1 = (key0 + _KEY_STEPS[0]) & _32_BITS, (key1 + _KEY_STEPS[1]) & _32_BITS
    return [c0, c1, c2, c3]


def _high(product: Tensor) -> Tensor:
    return (product >> 32) & _32_BITS
