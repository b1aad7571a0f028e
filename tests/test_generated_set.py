"""The generated detection set: the same for everyone, whole or absent, and annotated as COCO would."""

import errno
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fasttrain.errors import ConfigError, DataError
from fasttrain.recipes.image_sets.shapes import OUTLINES, unit_area
from fasttrain.recipes.retinanet import drawing, generated
from fasttrain.recipes.retinanet.drawing import GeneratedConfig, draw, visible_objects
from fasttrain.recipes.retinanet.generated import GeneratedSet, generate

SMALL = GeneratedConfig(train_images=60, val_images=7)


def _bytes(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> GeneratedSet:
    return generate(tmp_path_factory.mktemp("drawn"), SMALL, processes=1)


def test_pictures_do_not_depend_on_the_number_of_processes(drawn: GeneratedSet, tmp_path: Path) -> None:
    """One process, two and three give the same files byte for byte, and every picture has its own random stream."""
    one = _bytes(drawn.train_images.parent)
    assert len(one) == 60 + 7 + 3
    for processes in (2, 3):
        again = generate(tmp_path / str(processes), SMALL, processes=processes)
        assert _bytes(again.train_images.parent) == one
    assert len({content for name, content in one.items() if name.endswith(".jpg")}) == 67


def test_more_images_keep_the_first_ones() -> None:
    """A picture depends on seed, split and index only, not on how many are drawn."""
    more = replace(SMALL, train_images=1000)
    assert np.array_equal(draw(SMALL, "train", 3).picture, draw(more, "train", 3).picture)
    for other in (("val", 3, SMALL), ("train", 4, SMALL), ("train", 3, replace(SMALL, seed=1))):
        split, index, config = other
        assert not np.array_equal(draw(SMALL, "train", 3).picture, draw(config, split, index).picture)


def test_annotations_are_coco(drawn: GeneratedSet) -> None:
    """Both files load in pycocotools and agree with the pictures on disk."""
    from pycocotools.coco import COCO

    for images, annotations, count in (
        (drawn.train_images, drawn.train_annotations, 60),
        (drawn.val_images, drawn.val_annotations, 7),
    ):
        coco = COCO(str(annotations))
        assert len(coco.imgs) == len(list(images.iterdir())) == count
        assert [category["name"] for category in coco.loadCats(coco.getCatIds())] == list(SMALL.classes)
        for image in coco.imgs.values():
            with Image.open(images / image["file_name"]) as picture:
                assert (picture.format, picture.mode) == ("JPEG", "RGB")
                assert picture.size == (image["width"], image["height"]) == (96, 96)
        for annotation in coco.anns.values():
            x, y, width, height = annotation["bbox"]
            assert 0 <= x < x + width <= 96
            assert 0 <= y < y + height <= 96
            assert 0 < annotation["area"] <= width * height
            assert annotation["iscrowd"] == 0


@pytest.mark.parametrize("name", OUTLINES)
def test_owner_covers_the_painted_shape(name: str) -> None:
    """Painted over black, a shape is bright on the pixels that it owns and fades within a pixel around them."""
    for index in range(8):
        canvas = drawing._Canvas(np.random.default_rng(index), SMALL)
        canvas.picture[:] = 0.0
        assert canvas.place(OUTLINES[name], 0.3, 0.6, is_object=True)
        grey = canvas.picture.max(0)
        mask = canvas.owner == 0
        assert np.median(grey[mask]) > 25
        near = mask.copy()  # the mask and its eight neighbours
        for axis in (0, 1):
            near |= np.roll(near, 1, axis) | np.roll(near, -1, axis)
        assert grey[~near].max() < 0.6 * grey[mask].max()  # the thin end of a tip, less than half covered


def test_boxes_are_the_extent_of_visible_pixels() -> None:
    """Each side of each box touches a visible pixel of its object, none is outside, and enough of each is visible."""
    occluded = 0
    for index in range(60):
        picture = draw(SMALL, "train", index)
        for number, found in enumerate(visible_objects(picture)):
            mask = picture.owner == number
            x, y, width, height = found["bbox"]
            inside = mask[y : y + height, x : x + width]
            assert inside.sum() == mask.sum() == found["area"]
            assert all(side.any() for side in (inside[0], inside[-1], inside[:, 0], inside[:, -1]))
            area = unit_area(OUTLINES[SMALL.classes[found["label"]]])
            smallest = area * (0.5 * 96 * SMALL.min_size) ** 2
            assert found["area"] >= (1 - SMALL.max_hidden) * smallest
            occluded += found["area"] < 0.9 * smallest
    assert occluded > 0


def test_classes_are_balanced() -> None:
    """Every class holds 1/6 of the objects within a quarter of that, and pictures hold one to four objects."""
    drawings = [draw(SMALL, "train", index) for index in range(300)]
    counts = Counter(label for drawing in drawings for label in drawing.labels)
    share = sum(counts.values()) / len(SMALL.classes)
    assert all(0.75 * share < counts[label] < 1.25 * share for label in range(len(SMALL.classes)))
    assert {len(drawing.labels) for drawing in drawings} >= {1, 2, 3, 4}
    assert max(len(drawing.labels) for drawing in drawings) == 4


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    generate(tmp_path, SMALL, lambda done, total: seen.append((done, total)))
    assert seen == [(50, 67), (60, 67), (67, 67)]


def test_second_call_draws_nothing(drawn: GeneratedSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated, "draw", _must_not_run)
    assert generate(drawn.train_images.parents[1], SMALL, processes=1) == drawn


def test_another_config_goes_elsewhere(tmp_path: Path) -> None:
    few = replace(SMALL, train_images=2, val_images=1)
    folders = {generate(tmp_path, config, processes=1).val_images for config in (few, replace(few, seed=1))}
    assert len(folders) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_interrupted_set_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Ctrl-C or a full disk after some images leaves nothing behind, and the next call draws the whole set."""

    def stop(done: int, total: int) -> None:
        raise error

    with pytest.raises((KeyboardInterrupt, DataError)):
        generate(tmp_path, SMALL, stop)
    assert list(tmp_path.iterdir()) == []
    assert len(list(generate(tmp_path, SMALL).train_images.iterdir())) == 60


def test_damaged_set_is_drawn_anew(tmp_path: Path) -> None:
    """A missing image, annotation file or stamp, as a cleaner of caches may leave it."""
    few = replace(SMALL, train_images=3, val_images=1)
    whole = generate(tmp_path, few, processes=1)
    for damaged in (
        whole.train_images / "000001.jpg",
        whole.val_annotations,
        whole.val_images.parent / "generated.json",
    ):
        before = damaged.read_bytes()
        damaged.unlink()
        assert generate(tmp_path, few, processes=1) == whole
        assert damaged.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_full_disk_is_one_sentence(tmp_path: Path) -> None:
    def full(done: int, total: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DataError) as caught:
        generate(tmp_path, SMALL, full)
    assert str(caught.value) == (
        f"The generated images could not be written to {tmp_path} (No space left on device); "
        "name a folder with room for them in data.cache_folder or the environment variable FASTTRAIN_CACHE."
    )


def test_unwritable_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError) as caught:
        generate(tmp_path / "file" / "cache", SMALL)
    assert str(caught.value) == (
        f"The generated images could not be written to {tmp_path}/file/cache (Not a directory); "
        "name a folder with room for them in data.cache_folder or the environment variable FASTTRAIN_CACHE."
    )


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"classes": ("disc", "sqare")}, "generated.classes: no shape is called 'sqare'; did you mean 'square'?"),
        ({"classes": ()}, "generated.classes must name one or more different shapes, not []"),
        ({"image_size": 8}, "generated.image_size is 8; shapes can't be told apart below 32 pixels"),
        ({"val_images": 0}, "generated: 0 images were asked for; each split has 1 to 999999"),
        ({"min_objects": 5}, "generated: 5 to 4 objects; 1 <= min <= max <= 100"),
        ({"max_size": 2.0}, "generated: sizes 0.28 to 2.0; 0.05 <= min <= max <= 1 is needed"),
        ({"max_turn": 200.0}, "generated.max_turn is 200.0; an angle from 0 to 180 degrees is needed"),
        ({"max_hidden": 1.0}, "generated.max_hidden is 1.0; a fraction from 0 to less than 1 is needed"),
    ],
)
def test_undrawable_config_is_one_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GeneratedConfig(**values)
    assert str(caught.value) == sentence


def _must_not_run(*args: Any) -> None:
    raise AssertionError("the set was drawn again")
