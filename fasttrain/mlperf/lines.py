"""MLPerf's result file: a line an event.

    :::MLLOG {"namespace": "", "time_ms": 1653326180719, "event_type": "INTERVAL_START", "key": "run_start", ...}

They are written here rather than by the mlperf-logging package, whose logger is one for the whole process, and prints
too; its checker is what they are tested with, and all that needs it.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from fasttrain.mlperf.result import TOKEN
from fasttrain.results import disk_error


def line_of(key: str, value: Any, metadata: Mapping[str, Any], time_ms: int) -> str:
    """Return an event as a line; keys that end in _start and _stop are the ends of intervals."""
    kinds = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}
    event = {
        "namespace": "",
        "time_ms": time_ms,
        "event_type": kinds.get(key.rpartition("_")[2], "POINT_IN_TIME"),
        "key": key,
        "value": value,
        "metadata": dict(metadata),
    }
    return TOKEN + json.dumps(event)


def now_ms() -> int:
    """Return the wall clock as result files have it: milliseconds since 1970."""
    return time.time_ns() // 1_000_000


class ResultFile:
    """Events in the order in which they are told. On disk they are from `open` on, each line at once.

    Until then they are kept: a run that fails before its clock starts leaves no file, and doesn't harm an earlier one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[str] = []
        self._file: TextIO | None = None

    def event(self, key: str, value: Any = None, time_ms: int | None = None, **metadata: Any) -> None:
        """Add an event, of now unless told otherwise.

        Raises:
            DataError: the disk is full.
        """
        self._lines.append(line_of(key, value, metadata, now_ms() if time_ms is None else time_ms))
        if self._file is not None:
            self._write()

    def open(self) -> None:
        """Begin the file with what there is; one of an earlier run is replaced.

        Raises:
            DataError: it can't be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("w", encoding="ascii")
        except OSError as error:
            raise disk_error(self.path, error) from error
        self._write()

    def close(self) -> None:
        """End it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self) -> None:
        assert self._file is not None
        try:
            self._file.write("".join(line + "\n" for line in self._lines))
            self._file.flush()
        except OSError as error:
            raise disk_error(self.path, error) from error
        self._lines.clear()
