"""WordPiece by the tokenizers library: with a vocabulary that is given, or one trained on the text at hand."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasttrain.errors import ConfigError, DataError, MissingDependencyError

PAD, UNKNOWN, CLS, SEP, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MOST_LETTERS = 1000
Tokens = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Vocabulary:
    """Words and pieces of words; a word's number is its place."""

    words: tuple[str, ...]
    lower_case: bool

    @classmethod
    def of_file(cls, path: str | Path, lower_case: bool) -> "Vocabulary":
        """Read a vocab.txt: a word on each line, the five special ones among them, padding first.

        Raises:
            ConfigError: there is no such file.
            DataError: a special word is missing, or a word is there twice.
        """
        file = Path(path).expanduser()
        if not file.is_file():
            raise ConfigError(f"data.vocabulary: {file} does not exist.")
        words = tuple(line.rstrip("\n") for line in file.open(encoding="utf-8"))
        missing = [word for word in SPECIAL if word not in words]
        if missing or words[0] != PAD or len(set(words)) < len(words):
            wrong = (
                f"has no {missing[0]}" if missing else "has words twice" if words[0] == PAD else f"begins not by {PAD}"
            )
            raise DataError(
                f"{file} {wrong}; a vocabulary has a different word on each line, {PAD} on the first, and "
                f"{', '.join(SPECIAL[1:])} on others."
            )
        return cls(words, lower_case)

    @classmethod
    def trained(cls, texts: Iterable[str], size: int, lower_case: bool) -> "Vocabulary":
        """Return one of `size` words, or as many as its letters need, trained on texts: for equal texts the same."""
        texts = list(texts)
        tokenizer = _tokenizer({word: number for number, word in enumerate(SPECIAL)}, lower_case)
        letters = _letters(texts, tokenizer.normalizer)
        # The library numbers letters within words as they come out of a hash table, and decides by those numbers
        # between pairs that are as frequent as each other. Given as special words they have numbers before.
        given = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters)]
        trainers: Any = _library().trainers
        trainer = trainers.WordPieceTrainer(
            vocab_size=max(size, len(given)), special_tokens=given, limit_alphabet=len(letters), show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
        numbers: dict[str, int] = tokenizer.get_vocab()
        return cls(tuple(sorted(numbers, key=numbers.__getitem__)), lower_case)

    def write(self, file: Path) -> None:
        """Write a vocab.txt."""
        file.write_text("".join(f"{word}\n" for word in self.words), encoding="utf-8")

    @cached_property
    def number(self) -> dict[str, int]:
        """Return each word's number."""
        return {word: number for number, word in enumerate(self.words)}

    @cached_property
    def tokenizer(self) -> Any:
        """Return the tokenizer of the tokenizers library.

        Raises:
            MissingDependencyError: the package is not installed.
        """
        return _tokenizer(self.number, self.lower_case)

    def tokens_of(self, sentences: Sequence[str]) -> Iterator[Tokens]:
        """Yield the numbers of each sentence's words, (words,) uint16, or int32 for more than 65,536 words."""
        dtype = np.uint16 if len(self.words) <= 1 << 16 else np.int32
        for encoded in self.tokenizer.encode_batch(list(sentences), add_special_tokens=False):
            yield np.array(encoded.ids, dtype=dtype)

    def text_of(self, tokens: Iterable[int]) -> str:
        """Return tokens as text, pieces of words joined."""
        return " ".join(self.words[token] for token in tokens).replace(" ##", "")


def _letters(texts: Sequence[str], normalizer: Any) -> list[str]:
    """Return the most frequent letters, in order."""
    counted: Counter[str] = Counter()
    for text in texts:
        counted.update(text)
    of_raw = {letter: set(normalizer.normalize_str(letter)) for letter in counted}
    normalized: Counter[str] = Counter()
    for letter, count in counted.items():
        for each in of_raw[letter]:
            normalized[each] += count
    kept = sorted((item for item in normalized.items() if not item[0].isspace()), key=lambda item: (-item[1], item[0]))
    return sorted(letter for letter, _ in kept[:MOST_LETTERS])


def _tokenizer(numbers: dict[str, int], lower_case: bool) -> Any:
    library = _library()
    model = library.models.WordPiece(numbers, unk_token=UNKNOWN, max_input_chars_per_word=100)
    tokenizer = library.Tokenizer(model)
    tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=lower_case)
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _library() -> Any:
    # Unset, the library warns in every process that a loader forks later.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        import tokenizers
    except ImportError:
        raise MissingDependencyError(
            "text becomes tokens by the package tokenizers; `pip install tokenizers`, or name files that hold tokens "
            "already in data.hdf5."
        ) from None
    return tokenizers
