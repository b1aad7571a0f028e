"""Tar shards in webdataset's layout: members with a common stem belong together, `cat/17.jpg` and `cat/17.cls`.

The stem ends at the first dot of the file's own name. A label is `.cls`, a whole number as text, or the "label" (or
"cls") of a `.json` object. Other members are passed over. Images are found where they lie, so an order that is random
costs no more than one that isn't, and shards may be of any number and size.
"""

import json
import os
import tarfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from fasttrain.callbacks.dali_loader.archived import NO_LABEL, ArchivedSamples, ByteRanges, Row, archived_samples
from fasttrain.callbacks.dali_loader.image_size import image_size
from fasttrain.callbacks.dali_loader.labelled import IMAGE_SUFFIXES, LabelledImages
from fasttrain.errors import DataError

LABEL_SUFFIXES = (".cls", ".json")
MANIFEST = "shards.json"
BLOCK = 512  # bytes; a tar file is made of such, and two of zeros end it

Progress = Callable[[int, int], None]


def labelled_shards(shards: Path | Sequence[Path], on_progress: Progress | None = None) -> LabelledImages:
    """Return the images of tar shards with their labels, in the order of the shards and of the members in each.

    Args:
        shards: a folder (its `*.tar` by name), or the files.
        on_progress: called with the shards indexed and their number.

    Raises:
        DataError: no shards; one is cut off, compressed or empty; a member is there twice, has 0 bytes, or has no
            label; a label is no class index. The message names the archive and the member.
    """
    archives = _archives(shards)
    samples = archived_samples(archives, "tar", _index, on_progress)
    labels = samples.column("labels")
    missing = np.flatnonzero(labels == NO_LABEL)
    if missing.size:
        others = f", nor have {missing.size - 1:,} others" if missing.size > 1 else ""
        raise DataError(
            f"'{samples.name(int(missing[0]))}' has no label{others}: beside it a member with the same stem is needed, "
            '.cls, or .json with a "label".'
        )
    names = _class_names(archives[0].parent)
    highest = int(labels.max())
    if names is None:
        names = tuple(str(label) for label in range(highest + 1))
    if highest >= len(names):
        raise DataError(
            f"'{samples.name(int(labels.argmax()))}' has the label {highest}, but '{archives[0].parent / MANIFEST}' "
            f"names {len(names)} classes."
        )
    return LabelledImages(samples, labels, names, samples.image_sizes())


class ShardedFiles:
    """Images of tar shards in the order of a list of their names: an annotation file's. EncodedSamples.

    Raises:
        DataError: a name that no shard has, or two have.
    """

    def __init__(self, samples: ArchivedSamples, names: Sequence[str]) -> None:
        self.samples = samples
        place: dict[str, int] = {}
        for index, name in enumerate(samples.member_names()):
            if name in place:
                raise DataError(
                    f"'{name}' is in two shards, '{samples.name(place[name])}' and '{samples.name(index)}'; keep "
                    "one of them, or convert the set again."
                )
            place[name] = index
        absent = [name for name in names if name not in place]
        if absent:
            others = f" (and {len(absent) - 1:,} others)" if len(absent) > 1 else ""
            raise DataError(
                f"no shard in '{samples.archives[0].parent}' has the annotated image '{absent[0]}'{others}; convert "
                "the folder again, or correct the file_name entries."
            )
        self._members = np.array([place[name] for name in names], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._members)

    def read(self, index: int) -> NDArray[np.uint8]:
        """Return one sample's encoded bytes, (length,) uint8."""
        return self.samples.read(int(self._members[index]))

    def name(self, index: int) -> str:
        """Return the member and the archive that it is in."""
        return self.samples.name(int(self._members[index]))


def sharded_files(
    shards: Path | Sequence[Path], names: Sequence[str], on_progress: Progress | None = None
) -> ShardedFiles:
    """Return the images that an annotation file lists, out of tar shards whose members are called as it calls them.

    Args:
        shards: a folder (its `*.tar` by name), or the files.
        names: of the members wanted; the samples are in this order.
        on_progress: called with the shards indexed and their number.

    Raises:
        DataError: as for `labelled_shards`, labels aside; or an image that no shard has, or two have.
    """
    return ShardedFiles(archived_samples(_archives(shards), "tar", _index, on_progress), names)


def _archives(shards: Path | Sequence[Path]) -> list[Path]:
    if not isinstance(shards, Path):
        return list(shards)
    found = sorted(shards.glob("*.tar"))
    if not found:
        what = "has no tar files" if shards.is_dir() else "is no folder"
        raise DataError(f"'{shards}' {what}; `fasttrain convert` writes tar shards from a folder of images.")
    return found


def _class_names(folder: Path) -> tuple[str, ...] | None:
    """Return the names that the manifest beside the shards gives, or None."""
    try:
        names = json.loads((folder / MANIFEST).read_text())["classes"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return tuple(map(str, names)) if names else None


def _index(archive: Path) -> ByteRanges:
    with open(archive, "rb") as file:
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                rows = _rows(tar, archive)
                _check_end(file.fileno(), tar.offset, archive)
        except tarfile.TarError as error:
            file.seek(0)
            if file.read(4).startswith((b"\x1f\x8b", b"BZh", b"\xfd7zX", b"\x28\xb5\x2f\xfd")):
                raise DataError(
                    f"the archive '{archive}' is compressed, and a sample can't be found in that without unpacking all "
                    "before it; JPEGs don't get smaller: unpack it once to a plain .tar."
                ) from None
            raise DataError(
                f"the archive '{archive}' is cut off, damaged or no tar file ({error}); copy or write it again."
            ) from None
    if not rows:
        raise DataError(f"the archive '{archive}' holds no images ({', '.join(IMAGE_SUFFIXES)}); leave it out.")
    return ByteRanges.of_rows(rows)


def _rows(tar: tarfile.TarFile, archive: Path) -> list[Row]:
    images: dict[str, tarfile.TarInfo] = {}
    labels: dict[str, tuple[str, int]] = {}  # stem -> member, label
    seen: set[str] = set()
    for member in tar:
        if not member.isreg():
            continue
        name = member.name.removeprefix("./")
        if name in seen:
            raise DataError(f"'{archive}' has the member '{name}' twice; write it again, with each member once.")
        seen.add(name)
        suffix = os.path.splitext(name)[1].lower()
        if suffix not in IMAGE_SUFFIXES and suffix not in LABEL_SUFFIXES:
            continue
        if not member.size:
            raise DataError(f"'{archive}', '{name}' is empty (0 bytes); write the archive again from a whole file.")
        if suffix in IMAGE_SUFFIXES:
            images[name] = member
        elif (label := _label(tar, member, archive, name)) is not None and (
            suffix == ".cls" or _stem(name) not in labels
        ):
            labels[_stem(name)] = (name, label)
    _check_pairs(images, labels, archive)
    rows = []
    for name, member in images.items():
        size = image_size(partial(_head, cast(BinaryIO, tar.fileobj).fileno(), member))
        rows.append((name, member.offset_data, member.size, size, labels.get(_stem(name), ("", NO_LABEL))[1]))
    return rows


def _head(file: int, member: tarfile.TarInfo, count: int) -> bytes:
    return os.pread(file, min(count, member.size), member.offset_data)


def _stem(name: str) -> str:
    folder, _, file = name.rpartition("/")
    return f"{folder}/{file.partition('.')[0]}"


def _label(tar: tarfile.TarFile, member: tarfile.TarInfo, archive: Path, name: str) -> int | None:
    """Return a label member's class index; None for a .json that is about something else."""
    content = cast(IO[bytes], tar.extractfile(member)).read()
    label: object
    try:
        if name.lower().endswith(".cls"):
            label = int(content)
        else:
            document = json.loads(content)
            label = document.get("label", document.get("cls")) if isinstance(document, dict) else None
            if label is None:
                return None
    except ValueError:
        label = content[:20]
    if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < 2**31:
        raise DataError(f"'{archive}', '{name}' holds {label!r}; a class index is needed, a whole number from 0 on.")
    return label


def _check_pairs(images: Iterable[str], labels: dict[str, tuple[str, int]], archive: Path) -> None:
    of_stem: dict[str, str] = {}
    for name in images:
        other = of_stem.setdefault(_stem(name), name)
        if other != name and _stem(name) in labels:
            raise DataError(
                f"'{archive}' has two images for one label, '{other}' and '{name}'; give each a stem of its own."
            )
    for stem, (name, _) in labels.items():
        if stem not in of_stem:
            raise DataError(
                f"'{archive}' has the label '{name}' and no image with its stem ({', '.join(IMAGE_SUFFIXES)}); write "
                "the archive again, or without it."
            )


def _check_end(file: int, offset: int, archive: Path) -> None:
    """Raise DataError unless a block of zeros follows the last member: tarfile takes any other end for one, too."""
    block = os.pread(file, BLOCK, offset)
    if block != bytes(BLOCK):
        what = "is cut off" if len(block) < BLOCK else "is damaged"
        raise DataError(f"the archive '{archive}' {what} at byte {offset:,}; copy or write it again.")
