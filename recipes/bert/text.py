"""From text to files of sequences, once: documents, tokens, pairs."""

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from fasttrain.errors import DataError
from fasttrain.recipes.bert.documents import Document, TextFormat, documents_of
from fasttrain.recipes.bert.pairs import Sentences, pairs_of
from fasttrain.recipes.bert.sequences import writing
from fasttrain.recipes.bert.wordpiece import CLS, SEP, Vocabulary

SHARD_CHARACTERS = 1 << 26
"""Documents that are in memory at a time, and among which other documents are drawn; the reference has 500 shards."""


def split(documents: Iterable[Document], val_share: float, seed: int) -> tuple[list[Document], list[Document]]:
    """Return training and validation documents: whole ones, so that no sentence is in both.

    Raises:
        DataError: there is but one document.
    """
    every = [document for document in documents if document]
    if len(every) < 2:
        raise DataError(
            f"the text is {len(every)} document(s), and some must be kept for validation; give files of their own in "
            "data.val_text, or text_format=lines with an empty line between documents."
        )
    sizes = np.array([sum(map(len, document)) for document in every])
    order = np.random.default_rng((seed, len(every))).permutation(len(every))
    count = 1 + int(np.searchsorted(np.cumsum(sizes[order]), val_share * sizes.sum()))
    held_out = set(order[: min(count, len(every) - 1)].tolist())
    return (
        [document for number, document in enumerate(every) if number not in held_out],
        [document for number, document in enumerate(every) if number in held_out],
    )


def documents_in(files: Iterable[Path], form: TextFormat) -> Iterator[Document]:
    """Yield the documents of files, one after another."""
    return chain.from_iterable(documents_of(file, form) for file in files)


def write_pairs(
    folder: Path, documents: Iterable[Document], vocabulary: Vocabulary, max_length: int, short_share: float, seed: int
) -> None:
    """Write the documents' pairs as sequences [CLS] first [SEP] second [SEP]."""
    cls, sep = (np.array([vocabulary.number[word]]) for word in (CLS, SEP))
    with writing(folder, len(vocabulary.words)) as writer:
        for number, shard in enumerate(_shards(documents)):
            tokenized: list[Sentences] = [list(vocabulary.tokens_of(document)) for document in shard]
            for pair in pairs_of(tokenized, max_length, np.random.default_rng((seed, number)), short_share):
                tokens = np.concatenate([cls, pair.first, sep, pair.second, sep])
                writer.add(tokens, len(pair.first) + 2, int(pair.is_random))


def _shards(documents: Iterable[Document]) -> Iterator[list[Document]]:
    held: list[Document] = []
    characters = 0
    for document in documents:
        held.append(document)
        characters += sum(map(len, document))
        if characters >= SHARD_CHARACTERS:
            yield held
            held, characters = [], 0
    if held:
        yield held
