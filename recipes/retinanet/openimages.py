"""Convert OpenImages v6 box annotations to the COCO file of MLPerf's RetinaNet benchmark, `openimages-mlperf.json`.

    python -m fasttrain.recipes.retinanet.openimages train-annotations-bbox.csv train/labels/openimages-mlperf.json \\
        --descriptions class-descriptions-boxable.csv --images train/data

The layout is what mlcommons/training's download script gets from FiftyOne: images with at least one box of the wanted
classes in the order of their OpenImages ids, numbered from 1; categories in the order of the class list, numbered from
0; boxes are the normalized corners times the image's size, unrounded; area = width x height; iscrowd = IsGroupOf, where
FiftyOne takes any value but 0, so -1 (unknown) too, for true. Sizes are those of the stored pixels, whatever EXIF says.
MLPerf's reference trains on crowd boxes too: see `crowd_targets` of DetectionDataset.

The CSV is read twice, row by row, and the JSON is written as it comes, one record a line; memory holds the image ids.
"""

import csv
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer
from PIL import Image
from rich.progress import Progress

from fasttrain.errors import DataError, FasttrainError, nearest
from fasttrain.recipes.retinanet.coco_file import check_folder

# The 264 classes of mlcommons/training, retired_benchmarks/retinanet/scripts/download_openimages_mlperf.sh: those
# without subclasses in OpenImages' hierarchy that have at least 1000 samples.
MLPERF_CLASSES = tuple(
    """
Airplane, Antelope, Apple, Backpack, Balloon, Banana, Barrel, Baseball bat, Baseball glove, Bee, Beer, Bench, Bicycle,
Bicycle helmet, Bicycle wheel, Billboard, Book, Bookcase, Boot, Bottle, Bowl, Bowling equipment, Box, Boy, Brassiere,
Bread, Broccoli, Bronze sculpture, Bull, Bus, Bust, Butterfly, Cabinetry, Cake, Camel, Camera, Candle, Candy, Cannon,
Canoe, Carrot, Cart, Castle, Cat, Cattle, Cello, Chair, Cheese, Chest of drawers, Chicken, Christmas tree, Coat,
Cocktail, Coffee, Coffee cup, Coffee table, Coin, Common sunflower, Computer keyboard, Computer monitor,
Convenience store, Cookie, Countertop, Cowboy hat, Crab, Crocodile, Cucumber, Cupboard, Curtain, Deer, Desk, Dinosaur,
Dog, Doll, Dolphin, Door, Dragonfly, Drawer, Dress, Drum, Duck, Eagle, Earrings, Egg (Food), Elephant, Falcon, Fedora,
Flag, Flowerpot, Football, Football helmet, Fork, Fountain, French fries, French horn, Frog, Giraffe, Girl, Glasses,
Goat, Goggles, Goldfish, Gondola, Goose, Grape, Grapefruit, Guitar, Hamburger, Handbag, Harbor seal, Headphones,
Helicopter, High heels, Hiking equipment, Horse, House, Houseplant, Human arm, Human beard, Human body, Human ear,
Human eye, Human face, Human foot, Human hair, Human hand, Human head, Human leg, Human mouth, Human nose, Ice cream,
Jacket, Jeans, Jellyfish, Juice, Kitchen & dining room table, Kite, Lamp, Lantern, Laptop, Lavender (Plant), Lemon,
Light bulb, Lighthouse, Lily, Lion, Lipstick, Lizard, Man, Maple, Microphone, Mirror, Mixing bowl, Mobile phone,
Monkey, Motorcycle, Muffin, Mug, Mule, Mushroom, Musical keyboard, Necklace, Nightstand, Office building, Orange, Owl,
Oyster, Paddle, Palm tree, Parachute, Parrot, Pen, Penguin, Personal flotation device, Piano, Picture frame, Pig,
Pillow, Pizza, Plate, Platter, Porch, Poster, Pumpkin, Rabbit, Rifle, Roller skates, Rose, Salad, Sandal, Saucer,
Saxophone, Scarf, Sea lion, Sea turtle, Sheep, Shelf, Shirt, Shorts, Shrimp, Sink, Skateboard, Ski, Skull, Skyscraper,
Snake, Sock, Sofa bed, Sparrow, Spider, Spoon, Sports uniform, Squirrel, Stairs, Stool, Strawberry, Street light,
Studio couch, Suit, Sun hat, Sunglasses, Surfboard, Sushi, Swan, Swimming pool, Swimwear, Tank, Tap, Taxi, Tea,
Teddy bear, Television, Tent, Tie, Tiger, Tin can, Tire, Toilet, Tomato, Tortoise, Tower, Traffic light, Train,
Tripod, Truck, Trumpet, Umbrella, Van, Vase, Vehicle registration plate, Violin, Wall clock, Waste container, Watch,
Whale, Wheel, Wheelchair, Whiteboard, Window, Wine, Wine glass, Woman, Zebra, Zucchini
""".replace("\n", " ")
    .strip()
    .split(", ")
)

ATTRIBUTES = ("IsOccluded", "IsTruncated", "IsGroupOf", "IsDepiction", "IsInside")
COLUMNS = ("ImageID", "LabelName", "XMin", "XMax", "YMin", "YMax", *ATTRIBUTES)
ROWS_PER_REPORT = 100_000
IMAGES_PER_TASK = 256

Stage = Literal["reading boxes", "reading image sizes", "writing"]
Report = Callable[[Stage, int, int], None]  # stage, done, total


@dataclass(frozen=True)
class Conversion:
    """What was written."""

    images: int
    annotations: int
    categories: int
    missing: int  # images left out because their file is missing or unreadable
    unused: tuple[str, ...]  # classes without a box

    def __str__(self) -> str:
        text = f"{self.images:,} images, {self.annotations:,} boxes, {self.categories} classes"
        text += f" ({len(self.unused)} of them without a box)" if self.unused else ""
        return text + (f"; {self.missing:,} images without a readable file left out" if self.missing else "")


def convert(
    boxes: Path,
    output: Path,
    *,
    descriptions: Path,
    images: Path,
    classes: Sequence[str] = MLPERF_CLASSES,
    on_missing: Literal["error", "skip"] = "error",
    threads: int = 16,
    report: Report = lambda stage, done, total: None,
) -> Conversion:
    """Write the COCO file for one split of OpenImages.

    Args:
        boxes: train-annotations-bbox.csv or validation-annotations-bbox.csv.
        output: the JSON file; it appears only when it is complete.
        descriptions: class-descriptions-boxable.csv.
        images: folder with <ImageID>.jpg.
        classes: display names; their order is the order of the categories.
        on_missing: what an image without a readable file leads to: an error, or its boxes are left out and counted.
        threads: that read image headers.
        report: is called now and then with the stage, and how much of it is done.

    Raises:
        DataError: an input is missing or malformed (file, line and what was expected), or the output can't be written.
    """
    check_folder(images)
    labels = _labels_of(classes, descriptions)
    partial = output.with_name(output.name + ".partial")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()  # a folder that can't be written to shows now, not after an hour of reading
    except OSError as error:
        raise DataError(f"'{output}' can't be written: {error.strerror or error}.") from None
    try:
        return _convert(boxes, images, labels, classes, partial, output, on_missing, threads, report)
    finally:
        partial.unlink(missing_ok=True)


def _convert(
    boxes: Path,
    images: Path,
    labels: dict[str, int],
    classes: Sequence[str],
    partial: Path,
    output: Path,
    on_missing: Literal["error", "skip"],
    threads: int,
    report: Report,
) -> Conversion:
    wanted = sorted({row[0] for row in _box_rows(boxes, labels, report)})
    if not wanted:
        raise DataError(f"'{boxes}' has no box of any of the {len(classes)} classes; is it the file of boxes?")
    sizes, unreadable = _sizes(images, wanted, threads, report)
    if unreadable and (on_missing == "error" or not sizes):
        raise DataError(
            f"{len(unreadable):,} of the {len(wanted):,} images with boxes of these classes are missing or unreadable "
            f"in '{images}', first '{unreadable[0]}.jpg'; download them, or leave them out with --skip-missing."
        )
    counts = Counter[int]()
    try:
        with partial.open("w", encoding="utf-8") as file:
            for line in _document(boxes, labels, classes, sizes, counts, report):
                file.write(line)
        os.replace(partial, output)
    except OSError as error:
        raise DataError(f"'{output}' can't be written: {error.strerror or error}.") from None
    unused = tuple(name for category, name in enumerate(classes) if not counts[category])
    return Conversion(len(sizes), counts.total(), len(classes), len(unreadable), unused)


def read_class_list(path: Path) -> list[str]:
    """Return the class names of a text file, one a line; empty lines and lines that start with # don't count."""
    lines = [line.strip() for line in _lines(path)]
    names = [line for line in lines if line and not line.startswith("#")]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if not names or twice:
        problem = f"names '{twice[0]}' twice" if twice else "names no class"
        raise DataError(f"'{path}' {problem}; one class name a line is needed.")
    return names


def leaf_classes(boxes: Path, *, descriptions: Path, hierarchy: Path, min_boxes: int = 1000) -> list[str]:
    """Return the classes without subclasses that have at least `min_boxes` boxes, by name.

    Args:
        boxes: the training split's CSV, in which boxes are counted.
        descriptions: class-descriptions-boxable.csv.
        hierarchy: bbox_labels_600_hierarchy.json. Only "Subcategory" makes a parent: a body with parts is a leaf.
        min_boxes: the least number of boxes.
    """
    try:
        tree = json.loads("\n".join(_lines(hierarchy)))
        leaves = set(_leaves(tree)) - set(_parents(tree))
    except (json.JSONDecodeError, AttributeError, KeyError, TypeError):
        raise DataError(f"'{hierarchy}' is no class hierarchy: nested LabelName and Subcategory are needed.") from None
    names = _names(descriptions)
    counts = Counter(row[1] for row in _box_rows(boxes, leaves, lambda stage, done, total: None))
    return sorted(names[label] for label, count in counts.items() if count >= min_boxes and label in names)


def _parents(node: dict[str, Any]) -> Iterator[str]:
    if node.get("Subcategory"):
        yield node["LabelName"]
    for child in (*node.get("Subcategory", ()), *node.get("Part", ())):
        yield from _parents(child)


def _leaves(node: dict[str, Any]) -> Iterator[str]:
    if not node.get("Subcategory"):
        yield node["LabelName"]
    for child in (*node.get("Subcategory", ()), *node.get("Part", ())):
        yield from _leaves(child)


# ---- reading ---------------------------------------------------------------------------------------------------------


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise DataError(f"there is no file '{path}'; check the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"'{path}' can't be read: {error}.") from None


def _names(descriptions: Path) -> dict[str, str]:
    """Return label -> display name. The file has a header in some releases, which is no label: those begin with /m/."""
    rows = [row for row in csv.reader(_lines(descriptions)) if len(row) >= 2 and row[0].startswith("/")]
    if not rows:
        raise DataError(f"'{descriptions}' describes no class; lines such as '/m/014j1m,Apple' are needed.")
    return {row[0]: row[1] for row in rows}


def _labels_of(classes: Sequence[str], descriptions: Path) -> dict[str, int]:
    """Return label -> category id, in the order of the classes."""
    label_of = {name: label for label, name in _names(descriptions).items()}
    for name in classes:
        if name not in label_of:
            raise DataError(f"'{descriptions}' has no class '{name}'; {nearest(name, label_of)}")
    return {label_of[name]: category for category, name in enumerate(classes)}


def _box_rows(path: Path, labels: Collection[str], report: Report) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the wanted labels, in the order of COLUMNS."""
    try:
        raw = path.open("rb")
    except OSError as error:
        raise DataError(f"'{path}' can't be read: {error.strerror or error}.") from None
    with raw:
        size = max(os.fstat(raw.fileno()).st_size, 1)
        rows = csv.reader(line.decode("utf-8", errors="replace") for line in raw)
        header = next(rows, [])
        absent = [column for column in COLUMNS if column not in header]
        if absent:
            raise DataError(f"'{path}' has no column '{absent[0]}'; the columns {', '.join(COLUMNS)} are needed.")
        pick = itemgetter(*map(header.index, COLUMNS))
        label = header.index("LabelName")
        for number, row in enumerate(rows, start=2):
            if len(row) < len(header):
                raise DataError(f"'{path}', line {number}: {len(row)} of {len(header)} columns; is the file cut off?")
            if row[label] in labels:
                yield pick(row)
            if number % ROWS_PER_REPORT == 0:
                report("reading boxes", raw.tell(), size)
        report("reading boxes", size, size)


def _sizes(
    folder: Path, ids: list[str], threads: int, report: Report
) -> tuple[dict[str, tuple[int, int, int]], list[str]]:
    """Return id -> (number from 1, width, height) of the readable images, and the ids of the others."""
    tasks = [ids[start : start + IMAGES_PER_TASK] for start in range(0, len(ids), IMAGES_PER_TASK)]
    sizes: dict[str, tuple[int, int, int]] = {}
    unreadable: list[str] = []
    with ThreadPoolExecutor(threads) as pool:
        for task, found in zip(
            tasks, pool.map(lambda task: [_size(folder, name) for name in task], tasks), strict=True
        ):
            for name, size in zip(task, found, strict=True):
                if size is None:
                    unreadable.append(name)
                else:
                    sizes[name] = (len(sizes) + 1, *size)
            report("reading image sizes", len(sizes) + len(unreadable), len(ids))
    return sizes, unreadable


def _size(folder: Path, image_id: str) -> tuple[int, int] | None:
    try:
        with Image.open(folder / f"{image_id}.jpg") as image:  # reads the header only
            return image.size
    except Exception:  # Pillow's readers raise nearly anything on damaged files
        return None


# ---- writing ---------------------------------------------------------------------------------------------------------


def _document(
    boxes: Path,
    labels: dict[str, int],
    classes: Sequence[str],
    sizes: dict[str, tuple[int, int, int]],
    counts: Counter[int],
    report: Report,
) -> Iterator[str]:
    info = {"description": "OpenImages v6 boxes in COCO format, classes and layout of MLPerf's RetinaNet benchmark"}
    yield f'{{"info": {json.dumps(info)}, "licenses": [],\n"categories": [\n'
    yield from _joined({"id": i, "name": name, "supercategory": None} for i, name in enumerate(classes))
    yield '\n],\n"images": [\n'
    yield from _joined(
        {"id": number, "file_name": f"{name}.jpg", "height": height, "width": width, "license": None, "coco_url": None}
        for name, (number, width, height) in sizes.items()
    )
    yield '\n],\n"annotations": [\n'
    yield from _joined(_annotations(boxes, labels, sizes, counts, report))
    yield "\n]}\n"


def _joined(records: Iterator[dict[str, Any]]) -> Iterator[str]:
    for position, record in enumerate(records):
        yield (",\n" if position else "") + json.dumps(record)


def _annotations(
    boxes: Path,
    labels: dict[str, int],
    sizes: dict[str, tuple[int, int, int]],
    counts: Counter[int],
    report: Report,
) -> Iterator[dict[str, Any]]:
    """Yield the annotations of the listed images, and count them by category."""
    identity = 0
    for image_id, label, *values in _box_rows(boxes, labels, lambda stage, done, total: report("writing", done, total)):
        if image_id not in sizes:
            continue
        number, width, height = sizes[image_id]
        try:
            x1, x2, y1, y2 = map(float, values[:4])
            if not math.isfinite(x1 + x2 + y1 + y2):
                raise ValueError
            attributes = dict(zip(ATTRIBUTES, (int(value) != 0 for value in values[4:]), strict=True))
        except ValueError:
            row = ", ".join(f"{name}={value}" for name, value in zip(COLUMNS[2:], values, strict=True))
            raise DataError(f"'{boxes}', a box of image {image_id}: {row}; these must be numbers.") from None
        box = [x1 * width, y1 * height, (x2 - x1) * width, (y2 - y1) * height]
        identity += 1
        counts[labels[label]] += 1
        yield {
            "id": identity,
            "image_id": number,
            "category_id": labels[label],
            "bbox": box,
            "area": box[2] * box[3],
            "iscrowd": int(attributes["IsGroupOf"]),
            **attributes,
        }


# ---- command line ----------------------------------------------------------------------------------------------------

app = typer.Typer(add_completion=False)


@app.command()
def main(
    boxes: Annotated[Path, typer.Argument(help="train-annotations-bbox.csv or validation-annotations-bbox.csv")],
    output: Annotated[Path, typer.Argument(help="JSON file to write, such as train/labels/openimages-mlperf.json")],
    descriptions: Annotated[Path, typer.Option(help="class-descriptions-boxable.csv")],
    images: Annotated[Path, typer.Option(help="folder with <ImageID>.jpg")],
    classes: Annotated[Path | None, typer.Option(help="class names, one a line, instead of MLPerf's 264")] = None,
    hierarchy: Annotated[
        Path | None, typer.Option(help="bbox_labels_600_hierarchy.json: take its leaf classes instead")
    ] = None,
    counted_in: Annotated[
        Path | None,
        typer.Option(help="with --hierarchy: the CSV to count boxes in, if not BOXES (use the training one)"),
    ] = None,
    min_boxes: Annotated[int, typer.Option(help="with --hierarchy: the least number of boxes of a class")] = 1000,
    skip_missing: Annotated[bool, typer.Option(help="leave out images whose file is missing or unreadable")] = False,
    threads: Annotated[int, typer.Option(help="threads that read image headers")] = 16,
) -> None:
    """Convert OpenImages v6 boxes to COCO format, with the classes and layout of MLPerf's RetinaNet benchmark."""
    try:
        names: Sequence[str] = MLPERF_CLASSES
        if classes is not None:
            names = read_class_list(classes)
        elif hierarchy is not None:
            names = leaf_classes(
                counted_in or boxes, descriptions=descriptions, hierarchy=hierarchy, min_boxes=min_boxes
            )
        with Progress(disable=not sys.stderr.isatty(), transient=True) as bar:
            tasks = {stage: bar.add_task(stage, total=None) for stage in get_args(Stage)}
            result = convert(
                boxes,
                output,
                descriptions=descriptions,
                images=images,
                classes=names,
                on_missing="skip" if skip_missing else "error",
                threads=threads,
                report=lambda stage, done, total: bar.update(tasks[stage], completed=done, total=total),
            )
    except FasttrainError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{output}: {result}")


if __name__ == "__main__":
    app()
