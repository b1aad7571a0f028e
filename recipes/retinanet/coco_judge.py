"""The faults that a record of a COCO detection file can have, each told in one sentence.

`Judge` either raises at a fault or counts it and lets the caller leave the record out, as `on_bad_record` says. The
functions go over the images, the categories and the annotations of a parsed file, kind by kind: the annotations are
columns by then, so a fault is a mask over them. What counts as a fault is described in `coco`.
"""

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fasttrain.errors import DataError
from fasttrain.recipes.retinanet.coco_file import Parsed, missing_files, where_they_are, why_malformed

RecordPolicy = Literal["error", "skip"]

# Annotation tools round coordinates to whole or half pixels, so a box may end up to a pixel beyond the border.
OUTSIDE_TOLERANCE_PX = 1.0

LEFT_OUT, NOT_LISTED = -1, -2


@dataclass
class Judge:
    """Raises at a fault, or counts it, as the policy says."""

    file: Path
    policy: RecordPolicy
    skipped: dict[str, int] = field(default_factory=dict)  # kind of fault -> number of records

    def fault(self, kind: str, count: int, found: str, remedy: str, skip_does: str) -> None:
        """Settle `count` records with one kind of fault; `found` describes them by the first."""
        if self.policy == "error":
            raise DataError(f"'{self.file}': {found}; {remedy}, or set data.on_bad_record=skip to {skip_does}.")
        self.skipped[kind] = self.skipped.get(kind, 0) + count


def _and_more(count: int) -> str:
    return f" (and {count - 1:,} more like it)" if count > 1 else ""


# ---- categories ------------------------------------------------------------------------------------------------------


def judge_categories(file: Path, records: list[Any]) -> dict[Hashable, str]:
    """Return id -> name in ascending order of the ids, numbers before strings.

    Raises:
        DataError: there are none, or one lacks its id or name or shares its id.
    """
    if not records:
        raise DataError(f"'{file}' lists no categories; add the classes of its boxes to 'categories'.")
    names: dict[Hashable, str] = {}
    for position, record in enumerate(records):
        if not isinstance(record, dict) or not _is_id(record.get("id")):
            raise DataError(
                f"'{file}': the category at position {position} has no usable 'id'; give it a whole number or a string."
            )
        identity, name = record["id"], record.get("name")
        if not isinstance(name, str) or not name:
            raise DataError(f"'{file}': category {identity!r} has no 'name'; give it one.")
        if identity in names:
            both = f"'{names[identity]}' and '{name}'"
            raise DataError(f"'{file}': category id {identity!r} is given twice, to {both}; renumber one.")
        names[identity] = name
    return {identity: names[identity] for identity in _ascending(names)}


# ---- images ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Images:
    """The images that stay, by ascending id, and for each listed id the index of its image or LEFT_OUT.

    COCOeval goes through images by ascending id and keeps that order among detections of equal score. With indices in
    the same order a set scored by them has every digit of the score by the file's own ids.
    """

    names: list[str]
    ids: list[Any]
    sizes: NDArray[np.int32]  # (images, 2): width, height
    index_of: dict[Hashable, int]


def judge_images(records: list[Any], folder: Path, check_files: bool, judge: Judge) -> Images:
    """Judge the image records, and whether their files exist.

    Raises:
        DataError: under policy "error" for any fault; under "skip" if no image is left.
    """
    if not records:
        raise DataError(f"'{judge.file}' lists no images; a set of at least one image is needed.")
    kept: dict[Hashable, tuple[str, int, int]] = {}
    left_out: list[Hashable] = []
    malformed: list[str] = []
    twice: list[str] = []
    for position, record in enumerate(records):
        if wrong := _why_malformed_image(record):
            malformed.append(f"the image at position {position} {wrong}")
            left_out += [record["id"]] if isinstance(record, dict) and _is_id(record.get("id")) else []
        elif record["id"] in kept:
            both = f"'{kept[record['id']][0]}' and '{record['file_name']}'"
            twice.append(f"image id {record['id']!r} is given twice, to {both}")
        else:
            kept[record["id"]] = record["file_name"], int(record["width"]), int(record["height"])
    for kind, faults, remedy, does in (
        ("malformed image", malformed, "correct it", "leave such images out"),
        ("duplicate image id", twice, "renumber one", "keep the first only"),
    ):
        if faults:
            judge.fault(kind, len(faults), faults[0] + _and_more(len(faults)), remedy, does)
    if check_files:
        for identity in _without_file(kept, folder, judge):
            left_out.append(identity)
            del kept[identity]
    if not kept:
        raise DataError(f"'{judge.file}' has no usable image: all {len(records):,} were left out; correct the file.")
    ids = _ascending(kept)
    records_of = [kept[identity] for identity in ids]
    index_of = dict.fromkeys(left_out, LEFT_OUT) | {identity: index for index, identity in enumerate(ids)}
    sizes = np.array([record[1:] for record in records_of], dtype=np.int32)
    return Images([name for name, _, _ in records_of], ids, sizes, index_of)


def _is_id(value: Any) -> bool:
    """Accept integers, strings, and integers that a table program wrote as 7.0: they equal those written as 7."""
    return isinstance(value, int | str) or (isinstance(value, float) and value.is_integer())


def _ascending(ids: Iterable[Any]) -> list[Any]:
    """Return ids in ascending order, numbers before strings."""
    return sorted(ids, key=lambda identity: (isinstance(identity, str), identity))


def _why_malformed_image(record: Any) -> str:
    if not isinstance(record, dict):
        return "is not an object"
    for key in ("id", "file_name", "width", "height"):
        if key not in record:
            return f"has no '{key}'"
    if not _is_id(record["id"]):
        return f"has the id {record['id']!r}, not a whole number or a string"
    if not isinstance(record["file_name"], str) or not record["file_name"]:
        return f"has the file_name {record['file_name']!r}, not the name of a file"
    for key in ("width", "height"):
        size = record[key]
        if not isinstance(size, int | float) or not math.isfinite(size) or size != int(size) or not 0 < size < 2**31:
            return f"('{record['file_name']}') has the {key} {size!r}, not a positive whole number of pixels"
    return ""


def _without_file(kept: dict[Hashable, tuple[str, int, int]], folder: Path, judge: Judge) -> list[Hashable]:
    names = [name for name, _, _ in kept.values()]
    missing = missing_files(folder, names)
    if missing:
        first = names[missing[0]]
        found = f"{len(missing):,} of {len(names):,} listed images are not in '{folder}', first '{first}'"
        remedy = where_they_are(folder, first, judge.file)
        if len(missing) == len(names):
            raise DataError(f"'{judge.file}': {found}; {remedy}.")
        judge.fault("image file missing", len(missing), found, remedy, "leave them out")
    ids = list(kept)
    return [ids[position] for position in missing]


# ---- annotations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Boxes:
    """The annotations that stay, ordered by image and then as in the file."""

    image_of: NDArray[np.int64]  # index of the image
    labels: NDArray[np.int64]  # class index
    iscrowd: NDArray[np.bool_]
    xywh: NDArray[np.float64]  # as in the file, except for boxes that "skip" clipped
    xyxy: NDArray[np.float32]  # clipped to the image
    areas: NDArray[np.float64]


def judge_annotations(parsed: Parsed, images: Images, category_ids: list[Hashable], judge: Judge) -> Boxes:
    """Judge the annotations; class indices are positions in `category_ids`.

    Raises:
        DataError: under policy "error" for any fault.
    """
    return _Annotations(parsed, images, category_ids, judge).settled()


class _Annotations:
    """All annotations as columns, with a mask of those that stay."""

    def __init__(self, parsed: Parsed, images: Images, category_ids: list[Hashable], judge: Judge) -> None:
        self.parsed, self.images, self.judge = parsed, images, judge
        self.ids = parsed.columns.ids
        self.image_keys, self.category_keys = list(parsed.columns.image_ids), list(parsed.columns.category_ids)
        self.image_codes, self.category_codes, self.numbers, self.iscrowd = parsed.columns.arrays()
        indices = [images.index_of.get(key, NOT_LISTED) for key in self.image_keys]
        self.image_of = np.array(indices, dtype=np.int64)[self.image_codes]
        labels = {identity: label for label, identity in enumerate(category_ids)}
        known = [labels.get(key, NOT_LISTED) for key in self.category_keys]
        self.labels = np.array(known, dtype=np.int64)[self.category_codes]
        self.keep = np.ones(len(self.ids), dtype=np.bool_)

    def settled(self) -> Boxes:
        self._records()
        self._numbers()
        corners = self._against_image()
        areas = self.numbers[:, 4]
        areas = np.where(np.isnan(areas), self.numbers[:, 2] * self.numbers[:, 3], areas)
        rows = np.flatnonzero(self.keep)
        rows = rows[np.argsort(self.image_of[rows], kind="stable")]
        return Boxes(
            image_of=self.image_of[rows],
            labels=self.labels[rows],
            iscrowd=self.iscrowd[rows],
            xywh=self.numbers[rows, :4],
            xyxy=corners[rows],
            areas=areas[rows],
        )

    def _records(self) -> None:
        malformed = self.parsed.malformed
        if malformed:
            position, record = next(iter(malformed.items()))
            identity = record.get("id") if isinstance(record, dict) else None
            found = f"{_annotation(identity, position)} {why_malformed(record)}{_and_more(len(malformed))}"
            self.judge.fault("malformed annotation", len(malformed), found, "correct it", "leave such annotations out")
        self._settle(
            "duplicate annotation id",
            _repeated(self.ids),
            lambda row: "has the id of an earlier annotation",
            "renumber it",
        )
        self._settle(
            "annotation of an unlisted image",
            self.image_of == NOT_LISTED,
            lambda row: f"belongs to image {self.image_keys[self.image_codes[row]]!r}, which 'images' doesn't list",
            "list the image or remove the annotation",
        )
        orphans = self.keep & (self.image_of == LEFT_OUT)
        if orphans.any():
            self.judge.skipped["annotation of an image left out"] = int(orphans.sum())
            self.keep &= ~orphans
        self._settle(
            "annotation of an unlisted category",
            self.labels == NOT_LISTED,
            lambda row: (
                f"has the category {self.category_keys[self.category_codes[row]]!r}, which 'categories' doesn't list"
            ),
            "list the category or correct the annotation",
        )

    def _numbers(self) -> None:
        area = self.numbers[:, 4]
        self._settle(
            "box that is not finite", ~np.all(np.isfinite(self.numbers[:, :4]), axis=1), self._box, "correct it"
        )
        self._settle(
            "box without size",
            np.any(self.numbers[:, 2:4] <= 0, axis=1),
            lambda row: f"{self._box(row)}, but both sizes must be above 0",
            "correct it",
        )
        self._settle(
            "impossible area",
            np.isinf(area) | (area < 0),
            lambda row: f"has the area {area[row]:g}",
            "correct or remove the area",
        )

    def _against_image(self) -> NDArray[np.float32]:
        """Judge where the boxes lie, and return their corners clipped to the image."""
        limits = np.tile(self.images.sizes.astype(np.float64)[self.image_of], (1, 2))
        corners = self.numbers[:, :4].copy()
        with np.errstate(invalid="ignore", over="ignore"):  # rows that are out by now may hold NaN and infinity
            corners[:, 2:] += corners[:, :2]
            outside = np.any(corners[:, :2] >= limits[:, :2], axis=1) | np.any(corners[:, 2:] <= 0, axis=1)
            beyond = np.maximum(-corners, corners - limits).max(1, initial=0.0)
            clipped = np.clip(corners, 0.0, limits)
            small = clipped.astype(np.float32)
        self._settle(
            "box outside its image",
            outside,
            lambda row: f"{self._box(row)}, entirely outside {self._image(row)}",
            "correct it",
        )
        self._settle(
            "box without size",
            np.any(small[:, 2:] <= small[:, :2], axis=1),
            lambda row: f"{self._box(row)}, too small to tell its corners apart",
            "correct it",
        )
        stick_out = self.keep & (beyond > OUTSIDE_TOLERANCE_PX)
        self._settle(
            "box clipped to its image",
            stick_out,
            lambda row: f"{self._box(row)}, {beyond[row]:.4g} pixels beyond {self._image(row)}",
            "correct it",
            does="clip such boxes",
        )
        self.numbers[stick_out, :2] = clipped[stick_out, :2]
        self.numbers[stick_out, 2:4] = clipped[stick_out, 2:] - clipped[stick_out, :2]
        return small

    def _settle(
        self, kind: str, bad: NDArray[np.bool_], describe: Callable[[int], str], remedy: str, does: str = ""
    ) -> None:
        """Judge the bad rows that still stay; they are left out unless `does` says what else becomes of them."""
        rows = np.flatnonzero(bad & self.keep)
        if not rows.size:
            return
        first = int(rows[0])
        found = f"{_annotation(self.ids[first], self._position(first))} {describe(first)}{_and_more(rows.size)}"
        self.judge.fault(kind, rows.size, found, remedy, does or "leave such annotations out")
        if not does:
            self.keep[rows] = False

    def _position(self, row: int) -> int:
        """Return where a row stands in the file's list, where malformed records stand too."""
        return row + sum(position - before <= row for before, position in enumerate(sorted(self.parsed.malformed)))

    def _box(self, row: int) -> str:
        x, y, width, height = self.numbers[row, :4].tolist()
        return f"has the box x={x:g} y={y:g} width={width:g} height={height:g}"

    def _image(self, row: int) -> str:
        index = int(self.image_of[row])
        width, height = self.images.sizes[index].tolist()
        return f"image '{self.images.names[index]}' of {width} x {height} pixels"


def _annotation(identity: Any, position: int) -> str:
    return f"the annotation at position {position}" if identity is None else f"annotation {identity!r}"


def _repeated(ids: list[Any]) -> NDArray[np.bool_]:
    """Mark each id that occurred before; None, an absent id, may repeat."""
    seen: set[Any] = set()
    repeated = np.zeros(len(ids), dtype=np.bool_)
    for row, identity in enumerate(ids):
        if identity in seen:
            repeated[row] = True
        elif identity is not None:
            seen.add(identity)
    return repeated
