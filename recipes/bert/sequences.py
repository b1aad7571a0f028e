"""Sequences in files that are mapped into memory: written one by one, read by number, tens of millions of them."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from fasttrain.order import SampleKey
from fasttrain.recipes.bert.masking import Masking

PARTS = ("tokens", "lengths", "first_lengths", "next_sentence_label", "masked_counts", "masked_positions", "masked_ids")
"""Files of a folder, arrays of numbers without a header; the last three only where masks were drawn before."""

LISTS, POSITIONS = ("masked_lm_ids",), ("masked_lm_positions",)
"""Values of a sequence with an entry for each masked token, and those that are places in it."""


class SequenceWriter:
    """Appends sequences to a folder; see `writing`."""

    def __init__(self, folder: Path, stack: ExitStack, vocab_size: int) -> None:
        self.dtypes = {
            "tokens": "uint16" if vocab_size <= 1 << 16 else "int32", "lengths": "int32", "first_lengths": "int32",
            "next_sentence_label": "uint8", "masked_counts": "uint16", "masked_positions": "uint16",
            "masked_ids": "uint16" if vocab_size <= 1 << 16 else "int32",
        }  # fmt: skip
        self._files = {part: stack.enter_context((folder / f"{part}.bin").open("wb")) for part in PARTS}
        self.count, self.masked = 0, 0

    def add(
        self,
        tokens: NDArray[Any],
        first_length: int,
        label: int,
        masked: tuple[NDArray[Any], NDArray[Any]] | None = None,
    ) -> None:
        """Append a sequence.

        Args:
            tokens: (tokens,), special ones among them.
            first_length: how many of them are of the first segment.
            label: 1 if the second segment is of another document.
            masked: places that are masked already, and what was there; None leaves it to `StoredSequences`.
        """
        self._put("tokens", tokens)
        self._put("lengths", len(tokens))
        self._put("first_lengths", first_length)
        self._put("next_sentence_label", label)
        if masked is not None:
            self._put("masked_counts", len(masked[0]))
            self._put("masked_positions", masked[0])
            self._put("masked_ids", masked[1])
            self.masked += 1
        self.count += 1

    def _put(self, part: str, values: Any) -> None:
        self._files[part].write(np.asarray(values, dtype=self.dtypes[part]).tobytes())


@contextmanager
def writing(folder: Path, vocab_size: int) -> Iterator[SequenceWriter]:
    """Give a writer for a new set of sequences in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        writer = SequenceWriter(folder, stack, vocab_size)
        yield writer
    about = {"count": writer.count, "is_masked": writer.masked > 0, "dtypes": writer.dtypes}
    (folder / "about.json").write_text(json.dumps(about))


class StoredSequences(Dataset[dict[str, Tensor]]):
    """Sequences of a folder as samples, by `SampleKey` or number.

    A sample has `input_ids` and `token_type_ids`, (tokens,), `masked_lm_positions` and `masked_lm_ids`, (masked,), and
    `next_sentence_label`, (), all int64.

    Args:
        folder: that a `SequenceWriter` wrote.
        masking: for sequences that were written without masks.
        most: take the first so many sequences only.
    """

    def __init__(self, folder: Path, masking: Masking | None, most: int | None = None) -> None:
        self.folder, self.masking = folder, masking
        about: dict[str, Any] = json.loads((folder / "about.json").read_text())
        self.size: int = about["count"] if most is None else min(most, about["count"])
        self.is_masked: bool = about["is_masked"]
        self.dtypes: dict[str, str] = about["dtypes"]

    def __getstate__(self) -> dict[str, Any]:
        kept = ("folder", "masking", "size", "is_masked", "dtypes")  # a worker maps the files itself
        return {name: vars(self)[name] for name in kept}

    def __len__(self) -> int:
        return self.size

    def lengths(self) -> NDArray[np.int32]:
        """Return the tokens of each sequence, (sequences,)."""
        lengths: NDArray[np.int32] = self._parts["lengths"][: self.size]
        return lengths

    def __getitem__(self, key: int | SampleKey) -> dict[str, Tensor]:
        epoch, index = key if isinstance(key, SampleKey) else (0, key)
        if not 0 <= index < self.size:
            raise IndexError(f"there is no sequence {index} among {self.size}")
        parts = self._parts
        tokens = parts["tokens"][self._ends[index] : self._ends[index + 1]].astype(np.int64)
        if self.is_masked:
            part = slice(self._masked_ends[index], self._masked_ends[index + 1])
            places, words = (parts[name][part].astype(np.int64) for name in ("masked_positions", "masked_ids"))
        else:
            assert self.masking is not None
            tokens, places, words = self.masking(tokens, epoch, index)
        segments = (np.arange(len(tokens)) >= parts["first_lengths"][index]).astype(np.int64)
        return {
            "input_ids": torch.from_numpy(tokens),
            "token_type_ids": torch.from_numpy(segments),
            "masked_lm_positions": torch.from_numpy(places),
            "masked_lm_ids": torch.from_numpy(words),
            "next_sentence_label": torch.tensor(int(parts["next_sentence_label"][index])),
        }

    def tokens(self) -> NDArray[Any]:
        """Return all tokens, one sequence behind another, mapped into memory."""
        return self._parts["tokens"][: self._ends[-1]]

    @cached_property
    def _parts(self) -> dict[str, NDArray[Any]]:
        names = PARTS if self.is_masked else PARTS[:4]
        # As plain arrays: slices of a mapped one are mapped ones too, which take longer to make.
        return {
            name: np.asarray(np.memmap(file, mode="r", dtype=self.dtypes[name]))
            if (file := self.folder / f"{name}.bin").stat().st_size
            else np.zeros(0, dtype=self.dtypes[name])
            for name in names
        }

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return _offsets(self._parts["lengths"][: self.size])

    @cached_property
    def _masked_ends(self) -> NDArray[np.int64]:
        return _offsets(self._parts["masked_counts"][: self.size])


def _offsets(counts: NDArray[Any]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)])
