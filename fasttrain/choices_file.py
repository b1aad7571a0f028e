"""The file of choices: one for each device, torch and cuDNN, in JSON that a person can read and correct by deleting.

It is in $FASTTRAIN_CACHE, or ~/.cache/fasttrain. An entry is kept under its site's key; `winner` in it is for readers.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fasttrain.choices import PLAIN, Measured
from fasttrain.environment import cache_folder, installed_version
from fasttrain.errors import DataError
from fasttrain.measure import Timing

FORMAT = 1
"""Files of another format are as good as absent, and are written anew."""


def choices_path(device_name: str) -> Path:
    """Return where the choices for a device with this torch and cuDNN are; the file need not exist."""
    device = "-".join("".join(letter if letter.isalnum() else " " for letter in device_name).split())
    versions = f"torch-{torch.__version__}_cudnn-{torch.backends.cudnn.version()}"
    return cache_folder() / "choices" / f"{device}_{versions}.json"


def load_choices(path: Path) -> dict[str, Measured]:
    """Return what is known, by site key; nothing where there is no file.

    Raises:
        DataError: it can't be read, or is damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            return {}
        return {key: _measured(entry) for key, entry in content["sites"].items()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataError(f"the measured choices in {path} can't be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"the measured choices in {path} are damaged ({type(error).__name__}: {error}); delete the file, and "
            "`fasttrain tune` measures them anew."
        ) from error


def save_choice(path: Path, key: str, measured: Measured) -> None:
    """Add one site to the file, which is written whole or not at all. What another process wrote meanwhile stays.

    Raises:
        DataError: it can't be written, or is damaged.
    """
    known = {**load_choices(path), key: measured}
    content = {
        "format": FORMAT,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "triton": installed_version("triton"),
        "sites": {key: _entry(each) for key, each in sorted(known.items())},
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise DataError(
            f"the measured choices can't be written to {path} ({error.strerror}); name a folder that can be written in "
            "the environment variable FASTTRAIN_CACHE."
        ) from error


def _entry(measured: Measured) -> dict[str, Any]:
    entry = asdict(measured)
    times = {name: {part: round(value, 6) for part, value in times.items()} for name, times in entry["times"].items()}
    return {**entry, "times": times, "winner": measured.winner()}


def _measured(entry: Mapping[str, Any]) -> Measured:
    values = {key: value for key, value in entry.items() if key != "winner"}
    times = {name: Timing(**timing) for name, timing in entry["times"].items()}
    if not all(timing.median_ms > 0 for timing in times.values()) or PLAIN not in times:
        raise ValueError(f"times are {entry['times']}")
    return Measured(**{**values, "calls": tuple(entry["calls"]), "times": times})
