"""Tar shards from a folder of images: for sets of so many files that opening each costs more than reading it.

The same source gives the same bytes. A shard is written beside its place and moved there when it is whole, so that an
interrupted conversion goes on with the first shard that isn't there; the manifest comes last.
"""

import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasttrain.callbacks.dali_loader.labelled import images_by_class
from fasttrain.callbacks.dali_loader.tar_shards import BLOCK, MANIFEST
from fasttrain.errors import ConfigError, DataError, nearest

Progress = Callable[[int, int], None]
MEGABYTE = 10**6
UNFINISHED = "unfinished.json"  # what the manifest is called until all shards are there


@dataclass(frozen=True)
class Source:
    """One image to convert: its file, the member it becomes, and the member beside it, if any."""

    file: Path
    member: str
    label: int | None = None

    @property
    def label_member(self) -> str:
        """Name of the label's member."""
        return f"{os.path.splitext(self.member)[0]}.cls"


def convert(
    source: Path,
    destination: Path,
    *,
    annotations: Path | None = None,
    shard_megabytes: int = 256,
    on_progress: Progress | None = None,
) -> list[Path]:
    """Write the images of a folder as tar shards, and return these in order.

    Args:
        source: a folder with a folder for each class, or, with `annotations`, what its file names are relative to.
        destination: a folder of its own, made if need be.
        annotations: COCO-format file; its images are taken in its order under its names, and it is kept beside them.
        shard_megabytes: size that no shard exceeds, unless a single image does.
        on_progress: called with the bytes done and their number.

    Raises:
        DataError: no images, one is missing or empty, or the annotations can't be used.
        ConfigError: the destination holds something else, or has no room.
    """
    if shard_megabytes < 1:
        raise ConfigError(f"shards of {shard_megabytes} MB were asked for; at least 1 is needed.")
    if annotations is None:
        found = images_by_class(source)
        classes, sources = list(found), list(_of_classes(source, found))
    else:
        classes, sources = [], list(_of_annotations(source, annotations))
    if not sources:
        raise DataError(f"'{annotations or source}' has no images; nothing was converted.")
    lengths = [_length(one) for one in sources]
    plan = _plan(sources, lengths, shard_megabytes * MEGABYTE)
    shards = [destination / f"shard-{number:06d}.tar" for number in range(len(plan))]
    document = {
        "images": len(sources),
        "classes": classes,
        "annotations": annotations.name if annotations else None,
        "shards": {shard.name: part.stop - part.start for shard, part in zip(shards, plan, strict=True)},
    }
    try:
        _prepare(destination, shards, document)
        done, total = 0, sum(lengths)
        for shard, part in zip(shards, plan, strict=True):
            _write_shard(shard, sources[part], lengths[part])
            done += sum(lengths[part])
            if on_progress is not None:
                on_progress(done, total)
        if annotations is not None:
            _put(destination / annotations.name, lambda place: shutil.copyfile(annotations, place))
        with suppress(FileNotFoundError):  # already done
            (destination / UNFINISHED).replace(destination / MANIFEST)
    except OSError as error:
        raise ConfigError(
            f"'{destination}' can't be written ({error.strerror or error}); what is there stays, and the same command "
            "goes on with it."
        ) from error
    return shards


def _of_classes(folder: Path, classes: dict[str, list[Path]]) -> Iterator[Source]:
    """Yield the images in ImageFolder's order; a member is called as its file, without dots that would end the stem."""
    taken: set[str] = set()
    for label, files in enumerate(classes.values()):
        for file in files:
            path = file.relative_to(folder)
            stem = str(path.with_name(path.stem.replace(".", "_")))
            number = 1
            while stem in taken:  # a.jpg beside a.png
                number += 1
                stem = f"{path.with_name(path.stem.replace('.', '_'))}~{number}"
            taken.add(stem)
            yield Source(file, f"{stem}{path.suffix}", label)


def _of_annotations(folder: Path, annotations: Path) -> Iterator[Source]:
    try:
        document = json.loads(annotations.read_bytes())
    except OSError as error:
        raise DataError(f"'{annotations}' can't be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise DataError(f"'{annotations}' is no JSON, or cut off ({error}).") from error
    images = document.get("images") if isinstance(document, dict) else None
    if not isinstance(images, list):
        raise DataError(f"'{annotations}' has no list 'images'; a COCO detection file is needed.")
    taken: set[str] = set()
    for position, record in enumerate(images):
        name = record.get("file_name") if isinstance(record, dict) else None
        if not isinstance(name, str) or not name:
            raise DataError(f"'{annotations}': image record {position} has no 'file_name'.")
        if name in taken:
            raise DataError(f"'{annotations}' lists '{name}' twice; keep one of the two image records.")
        taken.add(name)
        yield Source(folder / name, name)


def _length(source: Source) -> int:
    try:
        length = source.file.stat().st_size
    except OSError as error:
        raise DataError(f"'{source.file}' can't be read: {error.strerror or error}; {_beside(source.file)}") from error
    if not length:
        raise DataError(f"'{source.file}' is empty (0 bytes); replace it, or take it out of the set.")
    return length


def _beside(file: Path) -> str:
    """Ask about a file of nearly the same name, or else about the folder."""
    with suppress(OSError):
        question = nearest(file.name, os.listdir(file.parent)[:1000])
        if question.endswith("?"):
            return question
    return "is it the right folder?"


def _plan(sources: Sequence[Source], lengths: Sequence[int], limit: int) -> list[slice]:
    """Return which sources go into which shard."""
    plan, begin, size = [], 0, tarfile.RECORDSIZE  # its end is padded to that
    for number, (source, length) in enumerate(zip(sources, lengths, strict=True)):
        header = BLOCK if len(source.member.encode()) < 100 and source.member.isascii() else 4 * BLOCK
        needed = header + -(-length // BLOCK) * BLOCK + (header + BLOCK if source.label is not None else 0)
        if size + needed > limit and number > begin:
            plan.append(slice(begin, number))
            begin, size = number, tarfile.RECORDSIZE
        size += needed
    return [*plan, slice(begin, len(sources))]


def _prepare(destination: Path, shards: Sequence[Path], document: dict[str, Any]) -> None:
    """Make the folder; refuse one with shards that this conversion would not write or go on with."""
    destination.mkdir(parents=True, exist_ok=True)
    others = sorted(set(destination.glob("*.tar")) - set(shards))
    begun = destination / UNFINISHED
    found = next((file for file in (destination / MANIFEST, begun) if file.is_file()), None)
    if found is not None:
        try:
            same = json.loads(found.read_text()) == document
        except ValueError:
            same = False
        if same and not others:
            return
    elif not others and not any(shard.exists() for shard in shards):
        text = json.dumps(document, indent=1)
        _put(begun, lambda place: place.write_text(text))
        return
    raise ConfigError(
        f"'{destination}' holds shards of another conversion; name an empty folder, or remove them and '{MANIFEST}'."
    )


def _write_shard(shard: Path, sources: Sequence[Source], lengths: Sequence[int]) -> None:
    """Write a shard unless it is there, and newer than its sources."""
    newest = max(source.file.stat().st_mtime_ns for source in sources)
    if shard.exists() and shard.stat().st_mtime_ns > newest:
        return
    _put(shard, lambda place: _write_tar(place, sources, lengths))


def _write_tar(place: Path, sources: Sequence[Source], lengths: Sequence[int]) -> None:
    with tarfile.open(place, "w", format=tarfile.PAX_FORMAT) as tar:
        for source, length in zip(sources, lengths, strict=True):
            data = source.file.read_bytes()
            if len(data) != length:
                raise DataError(f"'{source.file}' had {length:,} bytes and now has {len(data):,}; convert again.")
            _add(tar, source.member, data)
            if source.label is not None:
                _add(tar, source.label_member, str(source.label).encode())


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)  # without owner and time, so that the same source gives the same bytes
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def _put(file: Path, write: Callable[[Path], object]) -> None:
    """Write a file beside its place and move it there when it is whole."""
    unfinished = file.with_name(f".{file.name}.unfinished")
    try:
        write(unfinished)
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
