"""What a COCO detection file and its image folder hold, before any record of them is judged.

`parse` gives the file's lists, with the annotations already turned into columns: JSON's object hook takes each
annotation as soon as it is complete, so that millions of them never exist as dicts at the same time. `missing_files`
says which listed images the folder lacks, `where_they_are` guesses where they are instead. Faults of the file as a
whole raise DataError here; records are judged in `coco_judge`.
"""

import json
import math
import os
from array import array
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasttrain.errors import DataError, nearest

LISTS = ("images", "annotations", "categories")
ANNOTATION_KEYS = ("image_id", "category_id", "bbox")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".JPG", ".JPEG", ".PNG")
MAX_SUBFOLDERS = 200  # looked into when guessing where images are

_TAKEN = object()  # stands in the parsed list for an annotation that went into the columns


class AnnotationColumns:
    """The annotations of a file as columns, in file order.

    `image_of` and `category_of` hold codes: the position of an id among the keys of `image_ids` and `category_ids`.
    `numbers` holds x, y, width, height and area (NaN where absent) of each annotation.
    """

    def __init__(self) -> None:
        self.ids: list[Any] = []
        self.image_ids: dict[Any, int] = {}
        self.category_ids: dict[Any, int] = {}
        self.image_of = array("q")
        self.category_of = array("q")
        self.numbers = array("d")
        self.iscrowd = bytearray()

    def take(self, record: Any) -> Any:
        """Move an annotation into the columns; give anything else, a malformed annotation too, back unchanged."""
        if "image_id" not in record:
            return record
        try:
            x, y, width, height = record["bbox"]
            area = record.get("area")
            numbers = array("d", (x, y, width, height, math.nan if area is None else area))
            crowd = record.get("iscrowd", 0)
            if crowd not in (0, 1):
                return record
            category = self.category_ids.setdefault(record["category_id"], len(self.category_ids))
            image = self.image_ids.setdefault(record["image_id"], len(self.image_ids))
            identity = record.get("id")
            hash(identity)
        except (KeyError, TypeError, ValueError, OverflowError):
            return record
        self.ids.append(identity)
        self.image_of.append(image)
        self.category_of.append(category)
        self.numbers.extend(numbers)
        self.iscrowd.append(crowd)
        return _TAKEN

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64], NDArray[np.bool_]]:
        """Return image codes, category codes, numbers (five a row) and iscrowd."""
        return (
            np.array(self.image_of, dtype=np.int64),
            np.array(self.category_of, dtype=np.int64),
            np.array(self.numbers, dtype=np.float64).reshape(-1, 5),
            np.array(self.iscrowd, dtype=np.bool_),
        )


def why_malformed(record: Any) -> str:
    """Say what kept an annotation out of the columns."""
    if not isinstance(record, dict):
        return f"is {_shown(record)}, not an object"
    for key in ANNOTATION_KEYS:
        if key not in record:
            return f"has no '{key}'"
    for key in ("id", "image_id", "category_id"):
        if isinstance(record.get(key), list | dict):
            return f"has the {key} {_shown(record[key])}, not a number or a string"
    box = record["bbox"]
    if not isinstance(box, list) or len(box) != 4:
        return f"has the bbox {_shown(box)}, not four numbers x, y, width, height"
    for name, value in zip(("x", "y", "width", "height"), box, strict=True):
        if not isinstance(value, int | float):
            return f"has a bbox whose {name} is {_shown(value)}, not a number"
    if not isinstance(record.get("area", 0.0), int | float):
        return f"has the area {_shown(record['area'])}, not a number"
    if record.get("iscrowd", 0) not in (0, 1):
        return f"has the iscrowd {_shown(record['iscrowd'])}, not 0 or 1"
    return "has a number that is too large"


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:37] + "..."


@dataclass(frozen=True)
class Parsed:
    """The three lists of a COCO file; of the annotations, `malformed` has those not in the columns, by position."""

    images: list[Any]
    categories: list[Any]
    columns: AnnotationColumns
    malformed: dict[int, Any]


def parse(path: Path) -> Parsed:
    """Read a COCO detection file.

    Raises:
        DataError: there is no such file, or it isn't JSON, is cut off, or lacks one of its lists.
    """
    text = _text(path)
    columns = AnnotationColumns()
    document = _json(path, text, columns)
    if not isinstance(document, dict):
        kind = "a list" if isinstance(document, list) else "no object"
        raise DataError(f"'{path}' holds {kind}; a COCO detection file is an object with {_quoted(LISTS)}.")
    for key in LISTS:
        if not isinstance(document.get(key), list):
            raise DataError(f"'{path}' has no list '{key}'; a COCO detection file is an object with {_quoted(LISTS)}.")
    annotations = document["annotations"]
    if sum(record is _TAKEN for record in annotations) != len(columns.ids):
        # Something outside the list looked like an annotation too: take them again, from the list alone.
        columns = AnnotationColumns()
        records = json.loads(text)["annotations"]
        annotations = [columns.take(record) if isinstance(record, dict) else record for record in records]
    malformed = {i: record for i, record in enumerate(annotations) if record is not _TAKEN}
    return Parsed(document["images"], document["categories"], columns, malformed)


def _quoted(names: tuple[str, ...]) -> str:
    return "'" + "', '".join(names) + "'"


def _text(path: Path) -> str:
    if path.is_dir():
        inside = sorted(p.name for p in path.glob("*.json"))
        hint = f"such as '{path / inside[0]}'" if inside else "and there is none in it"
        raise DataError(f"'{path}' is a folder; the path of a COCO annotation file is needed, {hint}.")
    if not path.exists():
        raise DataError(f"there is no annotation file '{path}'; {_what_is_there(path)}")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"'{path}' can't be read: {error.strerror}.") from None
    if not data.strip(b"\0 \t\r\n"):
        raise DataError(f"'{path}' is empty; download or copy it again.")
    if data[:2] in (b"\x1f\x8b", b"PK"):
        raise DataError(f"'{path}' is a compressed archive; unpack it and give the JSON file inside.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            raise _cut_off(path, len(data)) from None
        raise DataError(f"'{path}' is not UTF-8 text (byte {error.start}); a COCO annotation file is JSON.") from None


def _json(path: Path, text: str, columns: AnnotationColumns) -> Any:
    try:
        return json.loads(text, object_hook=columns.take)
    except json.JSONDecodeError as error:
        if _ends_inside_a_value(text, error):
            raise _cut_off(path, len(text)) from None
        raise DataError(
            f"'{path}' is not JSON: {error.msg.rstrip()} at line {error.lineno}, column {error.colno}; "
            "a COCO annotation file is needed."
        ) from None
    except RecursionError:
        raise DataError(f"'{path}' is nested too deeply; a COCO annotation file is needed.") from None


def _ends_inside_a_value(text: str, error: json.JSONDecodeError) -> bool:
    """Tell a file that stops too early from one that isn't JSON: nothing but the start of a token is left."""
    rest = text[error.pos :].rstrip()
    if error.msg.startswith(("Unterminated string", "Extra data")):
        return error.msg.startswith("Unterminated")
    if error.msg.startswith("Invalid \\"):
        return len(rest) < len("\\u0000")
    half_number = len(rest) <= 2 and not rest.strip(",:-+.eE")
    return half_number or any(word.startswith(rest) for word in ("true", "false", "null", "NaN", "-Infinity"))


def _cut_off(path: Path, size: int) -> DataError:
    return DataError(
        f"'{path}' is cut off: it ends in the middle, after {size:,} characters; download or copy it again."
    )


def _what_is_there(path: Path) -> str:
    """Name the nearest thing beside a path that doesn't exist, or the first folder on the way that doesn't."""
    if not path.parent.is_dir():
        missing = next(parent for parent in reversed([path, *path.parents]) if not parent.exists())
        return f"nor is there a folder '{missing}'." if missing != path else "check the path."
    names = sorted(entry.name for entry in path.parent.iterdir())[:1000]
    return nearest(path.name, names) if names else f"the folder '{path.parent}' is empty."


# ---- image files -----------------------------------------------------------------------------------------------------


def check_folder(folder: Path) -> None:
    """Raise DataError unless `folder` is a folder with something in it."""
    if not folder.exists():
        raise DataError(f"there is no image folder '{folder}'; {_what_is_there(folder)}")
    if not folder.is_dir():
        raise DataError(f"the image folder '{folder}' is a file; the folder that holds the images is needed.")
    with os.scandir(folder) as entries:
        if next(entries, None) is None:
            raise DataError(f"the image folder '{folder}' is empty; download or unpack the images into it.")


def missing_files(folder: Path, names: list[str]) -> list[int]:
    """Return the positions of those names that are no file under `folder`.

    Each folder that occurs is listed once: seconds for a million images on a network disk, where asking for each one
    takes minutes.
    """
    listings: dict[str, set[str]] = {}
    missing = []
    for position, name in enumerate(names):
        parent, base = os.path.split(name)
        listing = listings.get(parent)
        if listing is None:
            listing = listings[parent] = _files_in(os.path.join(folder, parent))
        if base not in listing:
            missing.append(position)
    return missing


def _files_in(folder: str) -> set[str]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries if entry.is_file()}
    except OSError:
        return set()


def where_they_are(folder: Path, name: str, annotations: Path) -> str:
    """Return advice on an image that is not in the folder: where a file of its name is, or to fetch it."""
    absolute = folder.absolute()
    subfolders = _subfolders(absolute)
    beside = annotations.absolute().parent
    for root in (*subfolders, *absolute.parents[:3], beside, *_subfolders(beside)):
        if root.parent != root and (root / name).is_file():
            return f"it is found under '{root}': give that as the image folder"
    base = os.path.basename(name)
    for root in (absolute, *subfolders):
        if (root / base).is_file():
            return f"'{root / base}' has the same name: change the file_name entries to match, or the image folder"
    for suffix in IMAGE_SUFFIXES:
        other = (absolute / name).with_suffix(suffix)
        if other.is_file():
            return f"'{other}' differs in its ending only: correct the file_name entries"
    return "download or unpack the missing images, or remove them from the file"


def _subfolders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            found = islice((Path(entry.path) for entry in entries if entry.is_dir()), MAX_SUBFOLDERS)
            return sorted(found)
    except OSError:
        return []
