"""MLPerf's data as its submissions keep it: HDF5 files with rows of variable length, masks drawn already.

A file has `input_ids`, `segment_ids`, `masked_lm_positions` and `masked_lm_ids` with an array for each sequence,
without padding, and `next_sentence_labels` with a number (NVIDIA's MLPerf Training v2.0 BERT, `input_preprocessing`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fasttrain.errors import ConfigError, DataError, MissingDependencyError
from fasttrain.recipes.bert.sequences import SequenceWriter, writing

NAMES = ("input_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids", "next_sentence_labels")
CHUNK = 4096  # rows read at a time: 4096 * 512 tokens


def hdf5_files(path: str) -> list[Path]:
    """Return the files of a path: itself, or the .hdf5 and .h5 files in a folder, by name.

    Raises:
        ConfigError: there is nothing there.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    found = sorted(file for file in place.iterdir() if file.suffix in (".hdf5", ".h5")) if place.is_dir() else []
    if not found:
        raise ConfigError(f"data: {place} has no .hdf5 file; name one, or a folder with MLPerf's shards.")
    return found


def write_hdf5(folder: Path, files: Sequence[Path], vocab_size: int, max_length: int) -> None:
    """Write the sequences of HDF5 files to a folder, as they are, one file after another.

    Raises:
        MissingDependencyError: h5py is not installed.
        DataError: a file is not of this format, by file and row.
    """
    try:
        import h5py
    except ImportError:
        raise MissingDependencyError(
            "data.hdf5 needs the package h5py; `pip install 'fasttrain[hdf5]'`, or `pip install h5py`."
        ) from None
    with writing(folder, vocab_size) as writer:
        for file in files:
            try:
                opened: Any = h5py.File(file, "r")
            except OSError as error:
                raise DataError(f"{file} can't be read as HDF5 ({error}).") from None
            with opened:
                _copy(opened, file, writer, vocab_size, max_length)


def _copy(opened: Any, file: Path, writer: SequenceWriter, vocab_size: int, max_length: int) -> None:
    if missing := [name for name in NAMES if name not in opened]:
        raise DataError(f"{file} has no '{missing[0]}'; MLPerf's rows have {', '.join(NAMES)}.")
    for start in range(0, len(opened[NAMES[0]]), CHUNK):
        columns = [opened[name][start : start + CHUNK] for name in NAMES]
        for row, values in enumerate(zip(*columns, strict=True), start):
            tokens, segments, places, words = map(np.asarray, values[:4])
            first = int(np.argmax(segments)) if segments.any() else len(segments)
            if problem := _problem(tokens, segments, places, words, first, vocab_size, max_length):
                raise DataError(f"{file}, row {row}: {problem}.")
            writer.add(tokens, first, int(np.asarray(values[4]).item()), (places, words))


def _problem(tokens: Any, segments: Any, places: Any, words: Any, first: int, vocab_size: int, most: int) -> str:
    if not 1 <= len(tokens) <= most:
        return f"{len(tokens)} tokens, where data.max_length is {most}"
    if len(segments) != len(tokens) or not segments[first:].all():
        return "segment_ids are not zeros and then ones, one for each token"
    if len(places) != len(words) or (len(places) and not 0 <= places.min() <= places.max() < len(tokens)):
        return "masked_lm_positions do not lie in the sequence, or have not one masked_lm_ids each"
    if tokens.min() < 0 or max(tokens.max(), words.max(initial=0)) >= vocab_size:
        return f"a token outside of 0 to {vocab_size - 1}; set data.vocabulary or data.vocab_size to that of the files"
    return ""
