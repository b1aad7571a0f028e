"""How long the sequences are: one pass over a data set, kept in a file, and the histogram a plan is made from."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from fasttrain.errors import DataError

Lengths = NDArray[np.int32]
CHUNK = 1024
SPOT_CHECKS = 16


def lengths_of(dataset: Any, length_key: str, *, workers: int = 0, cache: Path | None = None) -> Lengths:
    """Return the number of tokens of each sample, (samples,) int32.

    Args:
        dataset: map-style. If it has a method `lengths()`, that is asked; else every sample is read once.
        length_key: the key of a sample whose number of entries is its length.
        workers: processes that read samples.
        cache: .npy file to find the lengths in, or to keep them in. A file whose number of samples differs, or that
            does not agree with some samples that are looked at, is refused.

    Raises:
        DataError: a sample has no such key, or the cache belongs to other data.
    """
    if callable(getattr(dataset, "lengths", None)):
        return _told(dataset)
    if cache is not None and cache.exists():
        return _from_cache(dataset, length_key, cache)
    reader = DataLoader(_LengthsOnly(dataset, length_key), batch_size=CHUNK, num_workers=workers, collate_fn=_as_array)
    chunks = list(reader)
    lengths = np.concatenate(chunks) if chunks else np.zeros(0, dtype=np.int32)
    if cache is not None:
        _keep(lengths, cache)
    return lengths


def histogram_of(lengths: NDArray[Any], max_length: int) -> NDArray[np.int64]:
    """Return the number of sequences by length, (max_length + 1,).

    Raises:
        DataError: a sequence is empty, or longer than `max_length`.
    """
    counted = np.zeros(max_length + 1, dtype=np.int64)
    for start in range(0, len(lengths), 1 << 20):  # lengths may be a file mapped into memory
        part = np.asarray(lengths[start : start + (1 << 20)])
        wrong = np.flatnonzero((part < 1) | (part > max_length))
        if len(wrong):
            index = start + int(wrong[0])
            raise DataError(f"sequence {index} has {int(part[wrong[0]])} tokens; a row takes from 1 to {max_length}.")
        counted += np.bincount(part, minlength=max_length + 1)
    return counted


def length_of(sample: Any, length_key: str, index: int) -> int:
    """Return a sample's number of tokens.

    Raises:
        DataError: the sample is no dict, or what is under the key has no length.
    """
    if not isinstance(sample, dict):
        raise DataError(
            f"sample {index} is a {type(sample).__name__}; packing needs dicts of named sequences, one of them "
            f"'{length_key}'."
        )
    if length_key not in sample:
        raise DataError(
            f"sample {index} has no '{length_key}', whose length says how many tokens it has; it has "
            f"{', '.join(map(str, sample))}. Name another by length_key."
        )
    try:
        return len(sample[length_key])
    except TypeError:
        raise DataError(
            f"'{length_key}' of sample {index} is a {type(sample[length_key]).__name__} without a length; name by "
            "length_key a sequence with an entry for each token."
        ) from None


class _LengthsOnly(Dataset[int]):
    def __init__(self, dataset: Any, length_key: str) -> None:
        self.dataset, self.length_key = dataset, length_key

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> int:
        return length_of(self.dataset[index], self.length_key, index)


def _as_array(lengths: list[int]) -> Lengths:
    return np.array(lengths, dtype=np.int32)


def _told(dataset: Any) -> Lengths:
    lengths = np.asarray(dataset.lengths())
    if lengths.shape != (len(dataset),):
        raise DataError(
            f"lengths() of {type(dataset).__name__} gives an array of shape {lengths.shape}; its {len(dataset)} "
            f"samples need one number each, ({len(dataset)},)."
        )
    return lengths if lengths.dtype in (np.int32, np.uint16) else lengths.astype(np.int32)


def _from_cache(dataset: Any, length_key: str, cache: Path) -> Lengths:
    lengths: Lengths = np.load(cache, mmap_mode="r")
    if lengths.shape != (len(dataset),):
        raise DataError(
            f"{cache} has the lengths of {len(lengths)} sequences, but the data set has {len(dataset)}; delete the "
            "file, and it is made again."
        )
    looked_at = np.linspace(0, len(lengths) - 1, min(SPOT_CHECKS, len(lengths))).astype(int)
    for index in looked_at.tolist():
        found = length_of(dataset[index], length_key, index)
        if found != lengths[index]:
            raise DataError(
                f"{cache} says that sequence {index} has {lengths[index]} tokens, but it has {found}; delete the file, "
                "and it is made again."
            )
    return lengths


def _keep(lengths: Lengths, cache: Path) -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    unfinished = cache.with_name(f"{cache.name}.{os.getpid()}.part")
    with unfinished.open("wb") as file:
        np.save(file, lengths)
    unfinished.replace(cache)  # whole or not at all: other ranks may be looking for it
