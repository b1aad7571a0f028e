"""Generated sets: drawn once into a cache folder, whole or not at all, by a few processes."""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress

from fasttrain.errors import DataError
from fasttrain.processes import in_processes

Result = TypeVar("Result")
OnProgress = Callable[[int, int], None]
Chunk = tuple[str, int, int]

STAMP = "generated.json"
CHUNK = 50  # images a process draws before it reports


def config_hash(version: int, values: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits that change with the drawing's version and any of its values."""
    described = json.dumps([version, values], sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()[:12]


def draw_once(
    place: Path, stamp: Mapping[str, Any], is_complete: Callable[[Path], bool], write: Callable[[Path], None]
) -> None:
    """Have a set written to `place`, unless it lies there whole.

    It is drawn beside its place and moved there when whole, so that an interrupted one is never used.

    Args:
        place: a folder of the set's own, whose name changes with whatever changes the set.
        stamp: kept in the folder; a folder with another stamp is not whole. Its `hash` tells sets apart.
        is_complete: whether a folder with the right stamp has all its files.
        write: writes the set into an empty folder.

    Raises:
        DataError: the folder cannot be written.
    """
    if _is_whole(place, stamp, is_complete):
        return
    unfinished = place.parent / f".{place.name}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        unfinished.mkdir(parents=True)
        write(unfinished)
        (unfinished / STAMP).write_text(json.dumps(stamp, indent=1))
        _move(unfinished, place, stamp, is_complete)
    except OSError as error:
        raise DataError(
            f"The generated images could not be written to {place.parent} ({error.strerror or error}); "
            "name a folder with room for them in data.cache_folder or the environment variable FASTTRAIN_CACHE."
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def draw_chunks(
    counts: Mapping[str, int],
    draw: Callable[[Chunk], list[Result]],
    on_progress: OnProgress | None = None,
    processes: int = 2,
) -> dict[str, list[Result]]:
    """Return what `draw` returns for all images of each split, in order; it runs in several processes.

    Args:
        counts: images of each split.
        draw: given (split, start, stop), draws these images; a partial of a module's function.
        on_progress: called with the number of images done, and their total.
        processes: how many; one draws in this process.
    """
    chunks = [(split, at, min(at + CHUNK, count)) for split, count in counts.items() for at in range(0, count, CHUNK)]
    found: dict[str, list[Result]] = {split: [] for split in counts}
    done = 0
    with closing(in_processes(draw, chunks, processes)) as results:
        for (split, _, _), drawn in zip(chunks, results, strict=True):
            found[split] += drawn
            done += len(drawn)
            if on_progress is not None:
                on_progress(done, sum(counts.values()))
    return found


@contextmanager
def drawing_bar() -> Iterator[OnProgress]:
    """Give a function that shows progress: on standard error, in a terminal only, and taken away at the end.

    A run's own output begins after it.
    """
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("drawing the generated set", total=None, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


def _is_whole(place: Path, stamp: Mapping[str, Any], is_complete: Callable[[Path], bool]) -> bool:
    try:
        found = json.loads((place / STAMP).read_text())
        return bool(found["hash"] == stamp["hash"]) and is_complete(place)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _move(unfinished: Path, place: Path, stamp: Mapping[str, Any], is_complete: Callable[[Path], bool]) -> None:
    """Rename a whole set into its place; another process that was there first with the same set is as good."""
    whole = partial(_is_whole, place, stamp, is_complete)
    if place.exists() and not whole():
        place.rename(unfinished / "damaged")
    try:
        unfinished.rename(place)
    except OSError:
        if not whole():
            raise
    shutil.rmtree(place / "damaged", ignore_errors=True)
