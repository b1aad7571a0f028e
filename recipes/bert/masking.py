"""The reference's masking: 15 % of a sequence's tokens are to be predicted, of which 80 % are hidden."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Masking:
    """Draws which tokens of a sequence are masked.

    Source: BERT's reference (`create_pretraining_data.py` in mlcommons/training) without whole-word masking, which is
    what MLPerf's data was made by. There each text comes with `dupe_factor` masks of its own; here the mask is a
    function of seed, epoch and sequence, and after `masks` epochs they come again.
    """

    mask_id: int
    special: tuple[int, ...]
    """Tokens that are never masked."""
    vocab_size: int
    share: float = 0.15
    most: int = 76
    masks: int = 10
    seed: int = 0

    def __call__(self, tokens: Numbers, epoch: int, index: int) -> tuple[Numbers, Numbers, Numbers]:
        """Return the tokens with some masked, the masked places in ascending order, and what was there.

        Of the masked ones 80 % become the mask, 10 % any word, 10 % stay.
        """
        random = np.random.default_rng((self.seed, epoch % self.masks, index))
        usual = np.ones(len(tokens), dtype=bool)
        for word in self.special:  # np.isin takes longer for a sequence and two words
            usual &= tokens != word
        candidates = np.flatnonzero(usual)
        count = min(self.most, max(1, round(len(tokens) * self.share)), len(candidates))
        places = np.sort(random.permutation(candidates)[:count])
        words = tokens[places]
        draw = random.random(count)
        others = random.integers(0, self.vocab_size, count)
        masked = tokens.copy()
        masked[places] = np.where(draw < 0.8, self.mask_id, np.where(draw < 0.9, others, words))
        return masked, places, words
