"""Encoded samples inside of archives: a table of byte ranges, read with `pread` wherever the archive came from.

An archive is looked through once. Its table lies in the cache folder from then on, and counts as long as the archive
has the size and the modification time that it had.
"""

import hashlib
import json
import os
import secrets
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from fasttrain.callbacks.dali_loader.image_size import ImageSizes
from fasttrain.environment import cache_folder, usable_cores
from fasttrain.errors import DataError

TABLE_VERSION = 1  # raise it whenever the same archive would give another table
NO_LABEL = -(2**63)
MAX_OPEN_FILES = 64

Row = tuple[str, int, int, tuple[int, int], int]  # name, offset, length, (width, height), label

COLUMNS = ("offsets", "lengths", "sizes", "labels", "name_ends", "name_bytes")


@dataclass(frozen=True, eq=False)
class ByteRanges:
    """Where an archive's samples lie in it, a row each."""

    offsets: NDArray[np.int64]  # of the encoded bytes
    lengths: NDArray[np.int64]
    sizes: NDArray[np.int32]  # (rows, 2): width and height in pixels, 0 where the header was not understood
    labels: NDArray[np.int64]  # NO_LABEL where the archive has none
    name_ends: NDArray[np.int64]  # the names lie one behind another: a million Python strings would take 100 MB
    name_bytes: NDArray[np.uint8]

    @classmethod
    def of_rows(cls, rows: Sequence[Row]) -> Self:
        """Make the columns."""
        names = [row[0].encode(errors="surrogateescape") for row in rows]
        return cls(
            offsets=np.array([row[1] for row in rows], dtype=np.int64),
            lengths=np.array([row[2] for row in rows], dtype=np.int64),
            sizes=np.array([row[3] for row in rows], dtype=np.int32).reshape(-1, 2),
            labels=np.array([row[4] for row in rows], dtype=np.int64),
            name_ends=np.cumsum([len(name) for name in names], dtype=np.int64),
            name_bytes=np.frombuffer(b"".join(names), dtype=np.uint8),
        )

    def __len__(self) -> int:
        return len(self.offsets)

    def name(self, row: int) -> str:
        """Return the member's name."""
        begin = self.name_ends[row - 1] if row else 0
        return self.name_bytes[begin : self.name_ends[row]].tobytes().decode(errors="surrogateescape")


class ArchivedSamples:
    """The samples of several archives, one archive after another. Reads from several threads, and after a fork."""

    def __init__(self, archives: Sequence[Path], tables: Sequence[ByteRanges]) -> None:
        self.archives, self.tables = list(archives), list(tables)
        self._ends = np.cumsum([len(table) for table in tables], dtype=np.int64).tolist()
        self._files = _OpenFiles(self.archives)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, index: int) -> NDArray[np.uint8]:
        """Return one sample's encoded bytes, (length,) uint8."""
        return self._first(index, sys.maxsize)

    def head(self, index: int, count: int) -> bytes:
        """Return the first bytes of a sample, all of them for a count beyond its length."""
        return self._first(index, count).tobytes()

    def name(self, index: int) -> str:
        """Return the member and the archive that it is in."""
        archive, row = self._place(index)
        return f"{self.tables[archive].name(row)} in {self.archives[archive]}"

    def column(self, name: str) -> Any:
        """Return a column of all archives' tables together."""
        return np.concatenate([getattr(table, name) for table in self.tables])

    def member_names(self) -> Iterator[str]:
        """Yield the members' names without their archives."""
        for table in self.tables:
            yield from map(table.name, range(len(table)))

    def image_sizes(self) -> ImageSizes:
        """Return the images' sizes as the tables have them."""
        return ImageSizes(self.head, self.column("sizes"), self.name)

    def close(self) -> None:
        """Close the archives; the next read opens them again."""
        self._files.close()

    def _place(self, index: int) -> tuple[int, int]:
        index = range(len(self))[index]
        archive = bisect_right(self._ends, index)
        return archive, index - (self._ends[archive - 1] if archive else 0)

    def _first(self, index: int, count: int) -> NDArray[np.uint8]:
        archive, row = self._place(index)
        table = self.tables[archive]
        length = min(count, int(table.lengths[row]))
        data = np.empty(length, dtype=np.uint8)
        try:
            with self._files.opened(archive) as file:
                got = os.preadv(file, [data.data], int(table.offsets[row]))
        except OSError as error:
            raise DataError(f"'{self.name(index)}' can't be read: {error.strerror or error}.") from error
        if got < length:
            raise DataError(
                f"'{self.name(index)}' ends after {got:,} of {length:,} bytes: the archive was cut off after it was "
                "indexed; copy it again."
            )
        return data


class _OpenFiles:
    """Descriptors of many files, opened when needed; those used longest ago are closed when there are too many."""

    def __init__(self, paths: Sequence[Path], limit: int = MAX_OPEN_FILES) -> None:
        self.paths, self.limit = paths, limit
        self._lock = threading.Lock()
        self._open: dict[int, list[int]] = {}  # file number -> descriptor, readers; in the order of use

    @contextmanager
    def opened(self, number: int) -> Iterator[int]:
        """Lend a descriptor, which stays open meanwhile."""
        with self._lock:
            entry = self._open.pop(number, None) or [os.open(self.paths[number], os.O_RDONLY), 0]
            entry[1] += 1
            self._open[number] = entry
            self._close_down_to(self.limit)
        try:
            yield entry[0]
        finally:
            with self._lock:
                entry[1] -= 1

    def close(self) -> None:
        with self._lock:
            self._close_down_to(0)

    def _close_down_to(self, limit: int) -> None:
        for number in [number for number, (_, readers) in self._open.items() if not readers]:
            if len(self._open) <= limit:
                return
            os.close(self._open.pop(number)[0])

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths, "limit": self.limit}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["paths"], state["limit"])  # type: ignore[misc]

    def __del__(self) -> None:
        self.close()


def archived_samples(
    archives: Sequence[Path],
    kind: str,
    index: Callable[[Path], ByteRanges],
    on_progress: Callable[[int, int], None] | None = None,
) -> ArchivedSamples:
    """Index archives, several at a time, or take their tables from the cache folder.

    Args:
        archives: in the order in which their samples are numbered.
        kind: of archive and of what is looked for in it; tables of different kinds are kept apart.
        index: makes an archive's table.
        on_progress: called with the archives done and their number.

    Raises:
        DataError: what `index` raises, for the first such archive, or one that isn't there.
    """
    tables = []
    with ThreadPoolExecutor(min(8, usable_cores())) as threads:
        for table in threads.map(lambda archive: _table(archive, kind, index), archives):
            tables.append(table)
            if on_progress is not None:
                on_progress(len(tables), len(archives))
    return ArchivedSamples(archives, tables)


def _table(archive: Path, kind: str, index: Callable[[Path], ByteRanges]) -> ByteRanges:
    try:
        state = archive.stat()
    except OSError as error:
        raise DataError(f"the archive '{archive}' can't be read: {error.strerror or error}.") from error
    if not state.st_size:
        raise DataError(f"the archive '{archive}' is empty (0 bytes); write or copy it again.")
    place = str(archive.resolve())
    stamp = json.dumps([TABLE_VERSION, kind, place, state.st_size, state.st_mtime_ns])
    kept = cache_folder() / "archives" / f"{hashlib.sha256(f'{kind} {place}'.encode()).hexdigest()[:24]}.npz"
    with suppress(OSError, ValueError, KeyError, EOFError, BadZipFile), np.load(kept) as columns:
        if str(columns["stamp"]) == stamp:
            return ByteRanges(**{name: columns[name] for name in COLUMNS})
    table = index(archive)
    unfinished = kept.with_name(f".{kept.stem}-{os.getpid()}-{secrets.token_hex(4)}.npz")
    with suppress(OSError):  # without a cache folder it is only slower
        kept.parent.mkdir(parents=True, exist_ok=True)
        np.savez(unfinished, stamp=np.array(stamp), **{name: getattr(table, name) for name in COLUMNS})
        unfinished.replace(kept)
    return table
