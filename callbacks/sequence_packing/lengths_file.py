"""Lengths of sequences from a file: one by one, or counted."""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fasttrain.errors import ConfigError, DataError

SUFFIXES = (".npy", ".json", ".txt", ".csv", ".tsv")
FORMATS = (
    ".npy with the length of each sequence, .json with a list of them or a mapping of length to count, or .txt, .csv "
    "or .tsv with a length, or a length and a count, on each line"
)


def histogram_in(file: Path, max_length: int | None = None) -> NDArray[np.int64]:
    """Return the number of sequences by length, (max_length + 1,).

    Args:
        file: .npy with (sequences,) integers; .json with a list of lengths or a mapping {length: count}; .txt, .csv or
            .tsv with a line for each sequence, or with length and count on each line, and at most one line of titles.
        max_length: None is the longest there is.

    Raises:
        ConfigError: the file's ending is none of these.
        DataError: it holds something else, or lengths that are not from 1 to `max_length`.
    """
    if file.suffix not in SUFFIXES:
        raise ConfigError(f"{file} is no file of lengths; give {FORMATS}.")
    try:
        lengths, counts = _read(file)
    except (ValueError, TypeError, OSError) as error:
        raise DataError(f"{file} can't be read as lengths ({error}); give {FORMATS}.") from None
    most = max_length or int(lengths.max(initial=1))
    wrong = np.flatnonzero((lengths < 1) | (lengths > most) | (counts < 0))
    if len(wrong):
        first = wrong[0]
        raise DataError(
            f"{file}, entry {first + 1}: {counts[first]} sequences of {lengths[first]} tokens; lengths are from 1 to "
            f"{most} tokens, a row's, and counts not negative."
        )
    histogram = np.zeros(most + 1, dtype=np.int64)
    np.add.at(histogram, lengths, counts)
    return histogram


def _read(file: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if file.suffix == ".npy":
        array = np.load(file, mmap_mode="r")
        if array.dtype.kind not in "iu" or array.ndim != 1:
            raise ValueError(f"it has shape {list(array.shape)} of {array.dtype}")
        lengths, counts = np.unique(array, return_counts=True)
        return lengths.astype(np.int64), counts.astype(np.int64)
    if file.suffix == ".json":
        held = json.loads(file.read_text())
        pairs = [(int(length), int(count)) for length, count in held.items()] if isinstance(held, dict) else [
            (int(length), 1) for length in held
        ]  # fmt: skip
    else:
        lines = [line.replace(",", " ").split() for line in file.read_text().splitlines() if line.strip()]
        if lines and not lines[0][0].isdigit():
            del lines[0]
        pairs = [(int(words[0]), int(words[1]) if len(words) > 1 else 1) for words in lines]
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]
