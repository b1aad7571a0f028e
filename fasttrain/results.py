"""The run folder: what a run was made from, what it measured, and how it ended. Nothing computed is lost on the way."""

import csv
import errno
import json
import os
from argparse import Namespace
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from fasttrain.environment import global_rank
from fasttrain.errors import ConfigError, DataError

FOLDER_OF_THIS_RUN = "FASTTRAIN_FOLDER_OF_THIS_RUN"
"""Environment variable by which the first process tells the others of the same run where to write."""

METRICS_HEADER = ("step", "epoch", "seconds", "name", "value")


class RunFolder:
    """Paths of a run's files, and their writing: each file is whole or absent."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path | None, recipe: str) -> "RunFolder":
        """Make a new folder: the given one, or runs/<recipe>/<date-time>.

        Raises:
            ConfigError: it can't be written, or holds a run already.
        """
        if global_rank() > 0:
            # Lightning's launcher runs the whole command once more for each further process.
            return cls(Path(os.environ.get(FOLDER_OF_THIS_RUN) or path or "runs"))
        folder = path or _free(Path("runs") / recipe / datetime.now().strftime("%Y%m%d-%H%M%S"))
        # A run that failed before its plan was made has left a result.json only, and nothing worth keeping.
        if (folder / "config.yaml").exists():
            raise ConfigError(
                f"{folder} holds a run already; go on with it by --resume {folder}, or give another --run-dir."
            )
        try:
            for name in ("", "plots", "samples", "checkpoints"):
                (folder / name).mkdir(parents=True, exist_ok=True)
            probe = folder / ".write-test"
            probe.write_text("")
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"the run folder {folder} can't be written ({error.strerror}); give another with --run-dir."
            ) from None
        os.environ[FOLDER_OF_THIS_RUN] = str(folder)
        return cls(folder)

    @classmethod
    def existing(cls, path: Path) -> "RunFolder":
        """Open a run's folder to resume or score it.

        Raises:
            ConfigError: it is none; the message says what a run folder holds.
        """
        if not (path / "config.yaml").is_file():
            found = "does not exist" if not path.exists() else "holds no config.yaml"
            raise ConfigError(
                f"{path} is no run folder: it {found}; `fasttrain fit` makes one with config.yaml, result.json and "
                "checkpoints/."
            )
        return cls(path)

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """The file of logged values."""
        return self.path / "metrics.csv"

    def write_text(self, name: str, text: str) -> None:
        """Write a file so that it is there whole or not at all.

        Raises:
            DataError: the disk is full or the folder can't be written.
        """
        target = self.path / name
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(target)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise disk_error(target, error) from error

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a mapping as JSON; numbers that JSON has no word for become null."""
        self.write_text(name, json.dumps(_finite(value), indent=2, ensure_ascii=False) + "\n")

    def read_json(self, name: str) -> dict[str, Any]:
        """Return a file's mapping; empty when it is absent or damaged."""
        try:
            value = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}


def is_disk_trouble(error: OSError) -> bool:
    """Whether an error is about the disk itself, and not about a file that somebody's code asked for."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def disk_error(path: Path, error: OSError) -> DataError:
    """Return the sentence for a file that could not be written."""
    why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
    return DataError(
        f"{path} can't be written: {why}; make room or choose another --run-dir, then go on with --resume."
    )


class MetricsFile(Logger):
    """A Lightning logger that appends one line a value: step, epoch, wall seconds, name, value.

    Long rather than wide, because values arrive at different steps under names not known beforehand, and because an
    appended line can't damage what is already there. `step` counts optimizer steps from 0, as Lightning's loggers do.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.seconds: Any = lambda: 0.0
        """Returns the wall seconds of the run, those before a resume included; set by the recorder."""
        self._pending: list[tuple[Any, ...]] = []

    @property
    def name(self) -> str:
        """Lightning's name of the logger's experiment."""
        return "metrics"

    @property
    def version(self) -> str:
        """A run folder has one."""
        return ""

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Do nothing: config.yaml holds them."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Keep the values until `save`, which Lightning calls at its logging interval's end."""
        epoch = metrics.get("epoch", "")
        epoch = int(epoch) if epoch != "" else ""
        seconds = round(self.seconds(), 3)
        for name, value in metrics.items():
            if name != "epoch":
                self._pending.append((step, epoch, seconds, name, repr(float(value))))

    @rank_zero_only
    def save(self) -> None:
        """Append what was logged.

        Raises:
            DataError: the disk is full.
        """
        if not self._pending:
            return
        try:
            self._append()
        except OSError as error:
            raise disk_error(self.path, error) from error
        self._pending.clear()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Append the rest."""
        self.save()

    @rank_zero_only
    def forget_from(self, step: int) -> None:
        """Take out the values of `step` and later ones: a resumed run will log them again."""
        if not self.path.exists():
            return
        with self.path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
        kept = [row for row in rows[1:] if len(row) == len(METRICS_HEADER) and row[0].isdigit() and int(row[0]) < step]
        temporary = self.path.with_suffix(".csv.new")
        with temporary.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([METRICS_HEADER, *kept])
        temporary.replace(self.path)

    def _append(self) -> None:
        new = not self.path.exists() or self.path.stat().st_size == 0
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if new:
                writer.writerow(METRICS_HEADER)
            writer.writerows(self._pending)


def _free(folder: Path) -> Path:
    candidate, number = folder, 2
    while candidate.exists():
        candidate, number = folder.with_name(f"{folder.name}-{number}"), number + 1
    return candidate


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and value - value != 0:  # inf or nan
        return None
    return value
