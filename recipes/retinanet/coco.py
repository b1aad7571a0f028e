"""Read a COCO detection file into compact arrays, every record judged on the way.

The format is that of https://cocodataset.org/#format-data: `images`, `annotations` (boxes as x, y, width, height in
pixels) and `categories`. What a fault is, and what becomes of it under `on_bad_record`:

- of the file or folder as a whole (missing, empty, cut off, no images, faulty categories): always a DataError;
- of a record (a value missing or malformed, an id given twice, an image or category that is not listed, NaN, a box
  without size or entirely outside its image, an image file that isn't there): "error" raises for the first and says
  how many more there are, "skip" leaves them out and counts them by kind in `DetectionSet.skipped`;
- a box that sticks out of its image by more than `OUTSIDE_TOLERANCE_PX`: "skip" clips and counts it, because the object
  is real and without its box the model would learn that it is background.

`id`, `area` and `iscrowd` of an annotation may be absent. COCO's own train2017 has two boxes of zero height.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasttrain.errors import DataError
from fasttrain.recipes.retinanet.coco_file import check_folder, parse
from fasttrain.recipes.retinanet.coco_judge import (
    Judge,
    RecordPolicy,
    judge_annotations,
    judge_categories,
    judge_images,
)


class ImageRecord(NamedTuple):
    """One listed image: where its file is, its id in the annotation file, and its size in pixels."""

    path: Path
    coco_id: Hashable
    width: int
    height: int


class ImageTable:
    """The listed images by ascending id, a sequence of ImageRecord kept in a few large arrays.

    A million of them take 50 MB, and worker processes made by fork share that memory for good, which they don't with
    Python objects: each look at one writes its reference count, which copies its page.
    """

    def __init__(self, folder: Path, names: list[str], ids: list[Any], sizes: NDArray[np.int32]) -> None:
        self.folder = folder
        encoded = [name.encode() for name in names]
        self._names = b"".join(encoded)
        self._ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        whole = all(type(identity) is int and abs(identity) < 2**63 for identity in ids)
        self._ids: NDArray[np.int64] | tuple[Hashable, ...] = np.array(ids, dtype=np.int64) if whole else tuple(ids)
        self.sizes = sizes  # (images, 2): width, height

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> ImageRecord:
        index = range(len(self))[index]
        identity = self._ids[index]
        width, height = self.sizes[index].tolist()
        coco_id = int(identity) if isinstance(identity, np.integer) else identity
        return ImageRecord(self.folder / self.name(index), coco_id, width, height)

    def __iter__(self) -> Iterator[ImageRecord]:
        return (self[index] for index in range(len(self)))

    def name(self, index: int) -> str:
        """Return `file_name` of the image at `index`."""
        return self._names[self._ends[index] : self._ends[index + 1]].decode()


@dataclass(frozen=True, eq=False)
class DetectionSet:
    """A judged detection set. Rows `first_box[i]` up to `first_box[i + 1]` of the box arrays are those of image i.

    Images and classes are numbered by ascending id, numbers before strings. For classes that makes files agree which
    list the same categories in another order; for images it is the order in which COCOeval breaks ties of the score.
    `boxes` are for training: clipped to the image. `file_boxes` are for scoring: as the file has them.
    """

    file: Path
    images: ImageTable
    first_box: NDArray[np.int64]  # (images + 1,)
    boxes: NDArray[np.float32]  # (boxes, 4): x1, y1, x2, y2 in pixels of the original image
    labels: NDArray[np.int64]  # (boxes,): class index
    iscrowd: NDArray[np.bool_]  # (boxes,)
    file_boxes: NDArray[np.float64]  # (boxes, 4): x, y, width, height
    areas: NDArray[np.float64]  # (boxes,): the file's, or else width * height
    category_ids: tuple[Hashable, ...]
    category_names: tuple[str, ...]
    skipped: dict[str, int] = field(default_factory=dict)  # kind of fault -> number of records left out or clipped

    @property
    def num_classes(self) -> int:
        """The number of categories, those without a box too."""
        return len(self.category_ids)

    def to_coco(self) -> dict[str, Any]:
        """Return the set as pycocotools' dict, with crowds and areas, for scoring detections.

        Image ids are the indices of the images, category ids the class indices; annotation ids count from 1, because
        COCOeval takes an annotation with id 0 for unmatched.
        """
        image_of = np.repeat(np.arange(len(self.images)), np.diff(self.first_box))
        columns = (image_of, self.labels, self.file_boxes, self.areas, self.iscrowd.astype(int))
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return {
            "info": {},
            "licenses": [],
            "images": [
                {"id": i, "file_name": self.images.name(i), "width": width, "height": height}
                for i, (width, height) in enumerate(self.images.sizes.tolist())
            ],
            "annotations": [
                {"id": i, "image_id": image, "category_id": label, "bbox": box, "area": area, "iscrowd": crowd}
                for i, (image, label, box, area, crowd) in enumerate(rows, start=1)
            ],
            "categories": [{"id": i, "name": name} for i, name in enumerate(self.category_names)],
        }


def read_annotations(
    annotations: Path,
    images: Path,
    *,
    check_files: bool = True,
    on_bad_record: RecordPolicy = "error",
    categories_of: DetectionSet | None = None,
) -> DetectionSet:
    """Read and judge a COCO detection file; the file names in it are relative to the folder `images`.

    Args:
        annotations: the JSON file.
        images: the image folder.
        check_files: whether the folder and each listed image in it must exist. No image is opened.
        on_bad_record: see the module's docstring.
        categories_of: number the classes as this set does, so that a validation file may list fewer categories.

    Raises:
        DataError: one sentence that names the file, the record, what is wrong and what to do.
    """
    annotations, images = Path(annotations), Path(images)
    parsed = parse(annotations)
    judge = Judge(annotations, on_bad_record)
    categories = judge_categories(annotations, parsed.categories)
    if categories_of is not None:
        categories = _categories_of(categories_of, annotations, categories)
    if check_files:
        check_folder(images)
    listed = judge_images(parsed.images, images, check_files, judge)
    boxes = judge_annotations(parsed, listed, list(categories), judge)
    return DetectionSet(
        file=annotations,
        images=ImageTable(images, listed.names, listed.ids, listed.sizes),
        first_box=np.searchsorted(boxes.image_of, np.arange(len(listed.names) + 1)),
        boxes=boxes.xyxy,
        labels=boxes.labels,
        iscrowd=boxes.iscrowd,
        file_boxes=boxes.xywh,
        areas=boxes.areas,
        category_ids=tuple(categories),
        category_names=tuple(categories.values()),
        skipped=judge.skipped,
    )


def _categories_of(reference: DetectionSet, file: Path, categories: dict[Hashable, str]) -> dict[Hashable, str]:
    known = dict(zip(reference.category_ids, reference.category_names, strict=True))
    remedy = "use the same categories in both files"
    for identity, name in categories.items():
        if identity not in known:
            absent = f"which '{reference.file}' doesn't"
            raise DataError(f"'{file}' lists category {identity!r} '{name}', {absent}; {remedy}.")
        if known[identity] != name:
            other = f"'{known[identity]}' in '{reference.file}'"
            raise DataError(f"category {identity!r} is '{name}' in '{file}' but {other}; {remedy}.")
    return known
