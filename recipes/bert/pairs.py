"""Pairs of sentences from documents, half of which follow one another.

The procedure is that of BERT's reference (`create_pretraining_data.py` in mlcommons/training): sentences of a document
are gathered up to a target length, cut into two parts at a random place, and in half of the pairs the second part is
replaced by sentences of another document, while those that it replaces are used again.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fasttrain.recipes.bert.wordpiece import Tokens

Sentences = Sequence[Tokens]


class Pair(NamedTuple):
    """Two parts without special tokens."""

    first: Tokens
    second: Tokens
    is_random: bool
    """The second part is of another document."""


def pairs_of(
    documents: Sequence[Sentences], max_length: int, random: np.random.Generator, short_share: float = 0.1
) -> Iterator[Pair]:
    """Yield the pairs of all documents, in their order.

    Args:
        documents: tokens of each sentence; other documents' sentences are drawn from the same.
        max_length: tokens of a pair with its three special ones, at most.
        short_share: how often a pair's target length is drawn between 2 and the longest, for shorter inputs.
    """
    documents = [document for document in documents if sum(map(len, document))]
    for number in range(len(documents)):
        yield from _of_document(documents, number, max_length - 3, random, short_share)


def _of_document(
    documents: Sequence[Sentences], number: int, most: int, random: np.random.Generator, short_share: float
) -> Iterator[Pair]:
    document, begin = documents[number], 0
    while begin < len(document):
        target = int(random.integers(2, most + 1)) if random.random() < short_share else most
        end = _reach(document, begin, target)
        cut = begin + 1 if end - begin == 1 else int(random.integers(begin + 1, end))
        first = np.concatenate(document[begin:cut])
        is_random = end - begin == 1 or bool(random.random() < 0.5)
        if is_random:
            second = _from_elsewhere(documents, number, target - len(first), random)
            begin = cut
        else:
            second = np.concatenate(document[cut:end])
            begin = end
        first, second = _shortened(first, second, most, random)
        if len(first) and len(second):
            yield Pair(first, second, is_random)


def _reach(document: Sentences, begin: int, target: int) -> int:
    """Return where sentences from `begin` on have as many tokens as wanted, or the document's end."""
    end, length = begin, 0
    while end < len(document) and (end == begin or length < target):
        length += len(document[end])
        end += 1
    return end


def _from_elsewhere(documents: Sequence[Sentences], number: int, target: int, random: np.random.Generator) -> Tokens:
    other = number
    for _ in range(10):  # with a single document, the sentences are of that
        other = int(random.integers(len(documents)))
        if other != number:
            break
    start = int(random.integers(len(documents[other])))
    return np.concatenate(documents[other][start : _reach(documents[other], start, target)])


def _shortened(first: Tokens, second: Tokens, most: int, random: np.random.Generator) -> tuple[Tokens, Tokens]:
    """Take tokens from the longer part until both fit, each from its front or its back, as a coin says."""
    excess = len(first) + len(second) - most
    if excess <= 0:
        return first, second
    longer, shorter = max(len(first), len(second)), min(len(first), len(second))
    # As if one by one, from the part that is longer then, and from the second where both are alike.
    from_longer = min(excess, longer - shorter)
    of_first = (excess - from_longer) // 2 + (from_longer if len(first) > len(second) else 0)
    return _cut(first, of_first, random), _cut(second, excess - of_first, random)


def _cut(part: Tokens, count: int, random: np.random.Generator) -> Tokens:
    front = int(random.binomial(count, 0.5))
    return part[front : len(part) - (count - front)]
