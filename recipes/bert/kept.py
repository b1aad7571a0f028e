"""Folders that are made once, whole or not at all, and found again by later runs and other processes."""

import hashlib
import json
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fasttrain.errors import DataError

STAMP = "made.json"


def made_once(folder: Path, prefix: str, described: Any, make: Callable[[Path], None]) -> Path:
    """Return the folder in which `make` has written what is described, making it unless it is there.

    It is made beside its place and moved there when whole, so that an interrupted one is never used.

    Args:
        folder: where such folders are.
        prefix: begin of its name; the rest is a hash of what is described.
        described: all that decides what is made, as JSON.
        make: called with an empty folder.

    Raises:
        DataError: the folder can't be written.
    """
    text = json.dumps(described, sort_keys=True)
    place = folder / f"{prefix}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if (place / STAMP).is_file():
        return place
    unfinished = folder / f".{place.name}-{secrets.token_hex(4)}"
    try:
        unfinished.mkdir(parents=True)
        make(unfinished)
        (unfinished / STAMP).write_text(text)
        try:
            unfinished.rename(place)
        except OSError:
            if not (place / STAMP).is_file():  # else another process was there first, with the same
                raise
    except OSError as error:
        raise DataError(
            f"{folder} can't be written ({error}); name a folder with room in data.cache_folder or the environment "
            "variable FASTTRAIN_CACHE."
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return place
