"""Which attention weights a dropout keeps, as a function of random words, so that nothing of its size is stored.

Each query has a random 32-bit word a for each head, and each key two, b and c, drawn by PyTorch's generator. A weight
is kept where a b + c, modulo 2^32 and taken as a signed number, reaches a threshold: two instructions for a weight, in
whatever order tiles go, where a counter-based generator takes some ten.

Each weight is dropped with probability p, to 2^-32, and the weights of one query are independent, since every key has
its own b and c. Two queries' weights of the same key differ by (a - a') b: as good as independent, unless a and a'
agree in nearly all of their low bits. (This is the multiply-add-shift hash of Dietzfelbinger, STACS 1996, with the
query for the key that is hashed.) Tests compare counts, correlations and singular values with those of independent
draws.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_LOWEST, _WORDS = -(2**31), 2**32


class Words(NamedTuple):
    """Random int32 of a call."""

    by_query: Tensor
    """(heads, tokens)."""
    by_key: Tensor
    """(heads, tokens, 2), a factor and a term."""


def draw_words(heads: int, tokens: int, device: torch.device | str) -> Words:
    """Return words from PyTorch's default generator for the device.

    A captured CUDA graph draws other ones at each replay, `torch.manual_seed` brings them back, and activation
    checkpointing with preserve_rng_state draws the same ones twice: all of this is the generator's doing.
    """
    words = torch.empty(3, heads, tokens, dtype=torch.int32, device=device).random_(_LOWEST, -_LOWEST)
    return Words(words[0], words[1:].view(heads, tokens, 2))


def threshold(dropout: float) -> int:
    """Return what the sum has to reach to be kept: the share `dropout` of all int32 is below."""
    return _LOWEST + round(dropout * _WORDS)


def keep_mask(words: Words, dropout: float) -> Tensor:
    """Return the mask of a call with these words, (heads, tokens, tokens) bool: queries by keys.

    It is as large as the kernels avoid, so it is for tests. Of queries and keys of different sequences it says nothing.
    """
    factor, term = words.by_key.unbind(-1)
    return words.by_query[:, :, None] * factor[:, None] + term[:, None] >= threshold(dropout)
