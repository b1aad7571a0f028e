"""COCO files: what is read out of a good one, and the sentence for every fault of a bad one."""

import copy
import io
import json
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain.errors import DataError
from fasttrain.recipes.retinanet.coco import DetectionSet, read_annotations

GOOD: dict[str, Any] = {
    "images": [
        {"id": 7, "file_name": "a.jpg", "width": 100, "height": 50},
        {"id": "b", "file_name": "b.jpg", "width": 40, "height": 60},
        {"id": 3, "file_name": "c.jpg", "width": 10, "height": 10},
    ],
    "annotations": [
        {"id": 1, "image_id": "b", "category_id": 9, "bbox": [0, 0, 40, 60], "area": 1200, "iscrowd": 1},
        {"id": 2, "image_id": 7, "category_id": 4, "bbox": [10.5, 5, 20, 30.25], "iscrowd": 0},
        {"id": 3, "image_id": 7, "category_id": 9, "bbox": [90, 40, 10.5, 10], "area": 99.5, "iscrowd": 0},
    ],
    "categories": [{"id": 9, "name": "cat"}, {"id": 4, "name": "dog"}],
}


def folder_with(path: Path, document: Any, files: tuple[str, ...] = ("a.jpg", "b.jpg", "c.jpg")) -> tuple[Path, Path]:
    """Write an annotation file and empty stand-ins for the images; return both paths."""
    images = path / "images"
    images.mkdir(exist_ok=True)
    for name in files:
        (images / name).touch()
    file = path / "set.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    return file, images


def read(path: Path, document: Any, **options: Any) -> DetectionSet:
    return read_annotations(*folder_with(path, document), **options)


def changed(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    document = copy.deepcopy(GOOD)
    change(document)
    return document


def with_box(*box: Any, **values: Any) -> dict[str, Any]:
    """The good file with one more annotation, 4, in image 7 (100 x 50)."""
    record = {"id": 4, "image_id": 7, "category_id": 4, "bbox": list(box), **values}
    return changed(lambda document: document["annotations"].append(record))


def test_images_and_classes_are_numbered_by_ascending_id(tmp_path: Path) -> None:
    found = read(tmp_path, GOOD)
    assert [record.coco_id for record in found.images] == [3, 7, "b"]
    assert found.images[2] == (tmp_path / "images" / "b.jpg", "b", 40, 60)
    assert found.first_box.tolist() == [0, 0, 2, 3]
    assert found.category_ids == (4, 9)
    assert found.category_names == ("dog", "cat")
    assert found.labels.tolist() == [0, 1, 1]
    assert found.iscrowd.tolist() == [False, False, True]
    assert found.boxes.tolist() == [[10.5, 5, 30.5, 35.25], [90, 40, 100, 50], [0, 0, 40, 60]]
    assert found.boxes.dtype == np.float32
    assert found.areas.tolist() == [605.0, 99.5, 1200.0]
    assert found.skipped == {}


def test_to_coco_keeps_boxes_areas_and_crowds_as_the_file_has_them(tmp_path: Path) -> None:
    coco = read(tmp_path, GOOD).to_coco()
    assert [image["id"] for image in coco["images"]] == [0, 1, 2]
    assert coco["categories"] == [{"id": 0, "name": "dog"}, {"id": 1, "name": "cat"}]
    assert coco["annotations"] == [
        {"id": 1, "image_id": 1, "category_id": 0, "bbox": [10.5, 5, 20, 30.25], "area": 605.0, "iscrowd": 0},
        {"id": 2, "image_id": 1, "category_id": 1, "bbox": [90, 40, 10.5, 10], "area": 99.5, "iscrowd": 0},
        {"id": 3, "image_id": 2, "category_id": 1, "bbox": [0, 0, 40, 60], "area": 1200.0, "iscrowd": 1},
    ]


def test_ids_of_annotations_may_be_absent_and_a_lookalike_elsewhere_does_no_harm(tmp_path: Path) -> None:
    document = changed(lambda d: [record.pop("id") for record in d["annotations"]])
    document["captions"] = [{"image_id": 7, "category_id": 4, "bbox": [0, 0, 1, 1]}]
    assert len(read(tmp_path, document).boxes) == 3


def test_ids_written_as_floats_equal_integers(tmp_path: Path) -> None:
    document = copy.deepcopy(GOOD)
    document["annotations"][1]["image_id"] = document["annotations"][2]["image_id"] = 7.0
    document["images"][2]["id"] = 3.0
    assert read(tmp_path, document).to_coco() == read(tmp_path, GOOD).to_coco()


def test_a_file_without_annotations_is_a_set_of_background(tmp_path: Path) -> None:
    found = read(tmp_path, {**GOOD, "annotations": []})
    assert found.boxes.shape == (0, 4)
    assert found.first_box.tolist() == [0, 0, 0, 0]


def test_real_blood_cells(txl_pbc: Path) -> None:
    sets = [read_annotations(txl_pbc / f"instances_{split}.json", txl_pbc) for split in ("train", "val", "test")]
    assert [len(found.images) for found in sets] == [1008, 288, 144]
    assert sum(len(found.boxes) for found in sets) == 26_637
    assert sets[0].category_names == ("WBC", "RBC", "Platelets")


def test_published_scores_are_reproduced_from_to_coco(golden: Path) -> None:
    """pycocotools gives its 12 published numbers on a ground truth that went through our arrays."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    folder = golden / "coco_eval"
    found = read_annotations(folder / "instances_val2014_100.json", folder, check_files=False)
    index_of = {record.coco_id: index for index, record in enumerate(found.images)}
    label_of = {identity: label for label, identity in enumerate(found.category_ids)}
    results = json.loads((folder / "instances_val2014_fakebbox100_results.json").read_text())
    with redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = found.to_coco()
        truth.createIndex()
        detections = [
            {**r, "image_id": index_of[r["image_id"]], "category_id": label_of[r["category_id"]]} for r in results
        ]
        scorer = COCOeval(truth, truth.loadRes(detections), "bbox")
        scorer.evaluate()
        scorer.accumulate()
        scorer.summarize()
    expected = json.loads((folder / "expected.json").read_text())["full_precision"]["bbox"]
    assert scorer.stats.tolist() == pytest.approx(expected, abs=1e-12)


# ---- faults of the whole file ---------------------------------------------------------------------------------------


def test_paths_that_are_wrong(tmp_path: Path) -> None:
    file, images = folder_with(tmp_path, GOOD)
    with pytest.raises(DataError, match=r"there is no annotation file '.*sett\.json'; did you mean 'set\.json'\?$"):
        read_annotations(tmp_path / "sett.json", images)
    with pytest.raises(
        DataError, match=r"there is no annotation file '.*x\.json'; nor is there a folder '.*/nowhere'\.$"
    ):
        read_annotations(tmp_path / "nowhere" / "deep" / "x.json", images)
    with pytest.raises(DataError, match=r"is a folder; the path of .* is needed, such as '.*/set\.json'\.$"):
        read_annotations(tmp_path, images)
    with pytest.raises(DataError, match=r"is a folder; .* is needed, and there is none in it\.$"):
        read_annotations(images, images)
    with pytest.raises(DataError, match=r"there is no image folder '.*/imagse'; did you mean 'images'\?$"):
        read_annotations(file, tmp_path / "imagse")
    with pytest.raises(
        DataError, match=r"the image folder '.*' is a file; the folder that holds the images is needed\.$"
    ):
        read_annotations(file, file)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"image folder '.*/empty' is empty; download or unpack the images into it\.$"):
        read_annotations(file, tmp_path / "empty")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty; download or copy it again."),
        ("\0\0\0\0", "is empty; download or copy it again."),
        ("<html>", "is not JSON: Expecting value at line 1, column 1; a COCO annotation file is needed."),
        (
            '{"images": [],}',
            "is not JSON: Expecting property name enclosed in double quotes at line 1, column 15; "
            "a COCO annotation file is needed.",
        ),
        ("[]", "holds a list; a COCO detection file is an object with 'images', 'annotations', 'categories'."),
        (
            '{"images": [], "categories": []}',
            "has no list 'annotations'; a COCO detection file is an object with 'images', 'annotations', 'categories'.",
        ),
        (json.dumps({**GOOD, "images": []}), "lists no images; a set of at least one image is needed."),
        (json.dumps({**GOOD, "categories": []}), "lists no categories; add the classes of its boxes to 'categories'."),
    ],
)
def test_files_that_are_no_detection_set(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(DataError) as error:
        read(tmp_path, text)
    assert str(error.value) == f"'{tmp_path / 'set.json'}' {sentence}"


def test_a_compressed_file_is_told_from_a_broken_one(tmp_path: Path) -> None:
    file, images = folder_with(tmp_path, GOOD)
    file.write_bytes(b"\x1f\x8b\x08rest")
    with pytest.raises(DataError, match=r"is a compressed archive; unpack it and give the JSON file inside\.$"):
        read_annotations(file, images)
    file.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(DataError, match=r"is not UTF-8 text \(byte 7\); a COCO annotation file is JSON\.$"):
        read_annotations(file, images)


def test_a_file_cut_off_anywhere_is_said_to_be_cut_off(tmp_path: Path) -> None:
    extra: dict[str, Any] = {"note": 'é \\ "', "flags": [True, None, -1.5e-3, float("nan")], "nested": [{}, []]}
    whole = json.dumps({**extra, "annotations": GOOD["annotations"][:1]}, ensure_ascii=False).encode()
    file, images = folder_with(tmp_path, GOOD)
    for size in range(1, len(whole)):
        file.write_bytes(whole[:size])
        with pytest.raises(
            DataError, match=r"is cut off: it ends in the middle, after \d+ characters; download or copy"
        ):
            read_annotations(file, images)


# ---- faults of records ----------------------------------------------------------------------------------------------

LEAVE = "set data.on_bad_record=skip to leave such annotations out."
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "malformed image": (
        changed(lambda d: d["images"][1].pop("width")),
        "the image at position 1 has no 'width'; correct it, or set data.on_bad_record=skip to leave such images out.",
    ),
    "image size": (
        changed(lambda d: d["images"][1].update(height=0)),
        "the image at position 1 ('b.jpg') has the height 0, not a positive whole number of pixels; correct it, "
        "or set data.on_bad_record=skip to leave such images out.",
    ),
    "duplicate image id": (
        changed(lambda d: d["images"][2].update(id=7)),
        "image id 7 is given twice, to 'a.jpg' and 'c.jpg'; renumber one, "
        "or set data.on_bad_record=skip to keep the first only.",
    ),
    "image id": (
        changed(lambda d: d["images"][1].update(id=None)),
        "the image at position 1 has the id None, not a whole number or a string; correct it, "
        "or set data.on_bad_record=skip to leave such images out.",
    ),
    "missing key": (
        changed(lambda d: d["annotations"][1].pop("bbox")),
        f"annotation 2 has no 'bbox'; correct it, or {LEAVE}",
    ),
    "not an object": (
        changed(lambda d: d["annotations"].insert(1, [5])),
        f"the annotation at position 1 is [5], not an object; correct it, or {LEAVE}",
    ),
    "three numbers": (
        with_box(1, 2, 3),
        f"annotation 4 has the bbox [1, 2, 3], not four numbers x, y, width, height; correct it, or {LEAVE}",
    ),
    "text for a number": (
        with_box(1, 2, "3", 4),
        f'annotation 4 has a bbox whose width is "3", not a number; correct it, or {LEAVE}',
    ),
    "null for a number": (
        with_box(1, None, 3, 4),
        f"annotation 4 has a bbox whose y is null, not a number; correct it, or {LEAVE}",
    ),
    "iscrowd": (
        with_box(1, 2, 3, 4, iscrowd="no"),
        f'annotation 4 has the iscrowd "no", not 0 or 1; correct it, or {LEAVE}',
    ),
    "text for an area": (
        with_box(1, 2, 3, 4, area="big"),
        f'annotation 4 has the area "big", not a number; correct it, or {LEAVE}',
    ),
    "list for an id": (
        with_box(1, 2, 3, 4, image_id=[7]),
        f"annotation 4 has the image_id [7], not a number or a string; correct it, or {LEAVE}",
    ),
    "duplicate annotation id": (
        with_box(1, 2, 3, 4, id=2),
        f"annotation 2 has the id of an earlier annotation; renumber it, or {LEAVE}",
    ),
    "unlisted image": (
        with_box(1, 2, 3, 4, image_id=99),
        f"annotation 4 belongs to image 99, which 'images' doesn't list; list the image or remove the annotation, "
        f"or {LEAVE}",
    ),
    "unlisted category": (
        with_box(1, 2, 3, 4, category_id="horse"),
        f"annotation 4 has the category 'horse', which 'categories' doesn't list; list the category or correct the "
        f"annotation, or {LEAVE}",
    ),
    "NaN": (
        with_box(1, 2, float("nan"), 4),
        f"annotation 4 has the box x=1 y=2 width=nan height=4; correct it, or {LEAVE}",
    ),
    "infinity": (
        with_box(float("-inf"), 2, 3, 4),
        f"annotation 4 has the box x=-inf y=2 width=3 height=4; correct it, or {LEAVE}",
    ),
    "zero size": (
        with_box(1, 2, 0, 4),
        f"annotation 4 has the box x=1 y=2 width=0 height=4, but both sizes must be above 0; correct it, or {LEAVE}",
    ),
    "negative size": (
        with_box(1, 2, 3, -4),
        f"annotation 4 has the box x=1 y=2 width=3 height=-4, but both sizes must be above 0; correct it, or {LEAVE}",
    ),
    "tiny size": (
        with_box(64, 2, 1e-9, 4),
        f"annotation 4 has the box x=64 y=2 width=1e-09 height=4, too small to tell its corners apart; correct it, "
        f"or {LEAVE}",
    ),
    "negative area": (
        with_box(1, 2, 3, 4, area=-1),
        f"annotation 4 has the area -1; correct or remove the area, or {LEAVE}",
    ),
    "entirely outside": (
        with_box(100, 2, 3, 4),
        "annotation 4 has the box x=100 y=2 width=3 height=4, entirely outside image 'a.jpg' of 100 x 50 pixels; "
        f"correct it, or {LEAVE}",
    ),
    "partly outside": (
        with_box(-8, 2, 30, 60),
        "annotation 4 has the box x=-8 y=2 width=30 height=60, 12 pixels beyond image 'a.jpg' of 100 x 50 pixels; "
        "correct it, or set data.on_bad_record=skip to clip such boxes.",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_sentence_of_each_faulty_record(tmp_path: Path, name: str) -> None:
    document, sentence = FAULTS[name]
    with pytest.raises(DataError) as error:
        read(tmp_path, document)
    assert str(error.value) == f"'{tmp_path / 'set.json'}': {sentence}"


def test_the_other_records_with_the_same_fault_are_counted(tmp_path: Path) -> None:
    document = with_box(1, 2, 0, 4)
    document["annotations"] += [{**document["annotations"][-1], "id": i} for i in (5, 6)]
    with pytest.raises(DataError, match=r"both sizes must be above 0 \(and 2 more like it\); correct it"):
        read(tmp_path, document)


def test_a_record_without_id_is_named_by_its_position_in_the_file(tmp_path: Path) -> None:
    document = with_box(1, 2, 0, 4, id=None)
    with pytest.raises(DataError, match="the annotation at position 3 has the box"):
        read(tmp_path, document)


@pytest.mark.parametrize(
    ("categories", "sentence"),
    [
        ([{"name": "cat"}], "the category at position 0 has no usable 'id'; give it a whole number or a string."),
        ([{"id": 4}], "category 4 has no 'name'; give it one."),
        (
            [{"id": 4, "name": "cat"}, {"id": 4, "name": "dog"}],
            "category id 4 is given twice, to 'cat' and 'dog'; renumber one.",
        ),
    ],
)
def test_faulty_categories_are_always_an_error(tmp_path: Path, categories: list[Any], sentence: str) -> None:
    with pytest.raises(DataError) as error:
        read(tmp_path, {**GOOD, "categories": categories}, on_bad_record="skip")
    assert str(error.value) == f"'{tmp_path / 'set.json'}': {sentence}"


def test_skip_leaves_faulty_records_out_and_counts_them(tmp_path: Path) -> None:
    document = copy.deepcopy(GOOD)
    for box, values in (
        ([1, 2, 0, 4], {}),
        ([1, 2, float("nan"), 4], {}),
        ([1, 2, -3, 4], {}),
        ([1, 2], {}),
        ([1, 2, 3, 4], {"image_id": 99}),
        ([1, 2, 3, 4], {"category_id": 99}),
        ([200, 2, 3, 4], {}),
        ([1, 2, 3, 4], {"id": 1}),
        ([5, 5, 5, 5], {"image_id": "bad"}),
    ):
        document["annotations"].append(
            {"id": 100 + len(document["annotations"]), "image_id": 7, "category_id": 4, "bbox": box, **values}
        )
    document["images"] += [{"id": 7, "file_name": "twice.jpg", "width": 9, "height": 9}, {"id": "bad"}]
    found = read(tmp_path, document, on_bad_record="skip")
    assert found.skipped == {
        "malformed image": 1,
        "duplicate image id": 1,
        "malformed annotation": 1,
        "duplicate annotation id": 1,
        "annotation of an unlisted image": 1,
        "annotation of an image left out": 1,
        "annotation of an unlisted category": 1,
        "box that is not finite": 1,
        "box without size": 2,
        "box outside its image": 1,
    }
    assert found.to_coco() == read(tmp_path, GOOD).to_coco()


def test_skip_clips_a_box_that_sticks_out_for_training_and_scoring(tmp_path: Path) -> None:
    found = read(tmp_path, with_box(-8, 2, 30, 60), on_bad_record="skip")
    assert found.skipped == {"box clipped to its image": 1}
    assert found.boxes[2].tolist() == [0, 2, 22, 50]
    assert found.file_boxes[2].tolist() == [0, 2, 22, 48]


def test_a_pixel_of_rounding_beyond_the_border_is_clipped_for_training_only(tmp_path: Path) -> None:
    found = read(tmp_path, with_box(-1, 2, 102, 49))
    assert found.skipped == {}
    assert found.boxes[2].tolist() == [0, 2, 100, 50]
    assert found.file_boxes[2].tolist() == [-1, 2, 102, 49]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(*[st.floats(-200, 200, width=32)] * 2, *[st.floats(0, 300, width=32)] * 2), min_size=1, max_size=8
    )
)
def test_whatever_the_boxes_those_for_training_lie_in_their_image(
    tmp_path_factory: pytest.TempPathFactory, boxes: list[tuple[float, ...]]
) -> None:
    records = [{"image_id": 7, "category_id": 4, "bbox": box} for box in boxes]
    found = read(tmp_path_factory.mktemp("boxes"), {**GOOD, "annotations": records}, on_bad_record="skip")
    assert (found.boxes >= 0).all()
    assert (found.boxes[:, 2:] <= [100, 50]).all()
    assert (found.boxes[:, 2:] > found.boxes[:, :2]).all()
    clipped = found.skipped.get("box clipped to its image", 0)
    assert len(found.boxes) + sum(found.skipped.values()) - clipped == len(boxes)


# ---- image files ----------------------------------------------------------------------------------------------------


def test_a_missing_image_file_is_counted_and_named(tmp_path: Path) -> None:
    file, images = folder_with(tmp_path, GOOD, files=("a.jpg",))
    with pytest.raises(DataError) as error:
        read_annotations(file, images)
    assert str(error.value) == (
        f"'{file}': 2 of 3 listed images are not in '{images}', first 'b.jpg'; download or unpack the missing images, "
        "or remove them from the file, or set data.on_bad_record=skip to leave them out."
    )
    found = read_annotations(file, images, on_bad_record="skip")
    assert found.skipped == {"image file missing": 2, "annotation of an image left out": 1}
    assert [record.path.name for record in found.images] == ["a.jpg"]
    assert len(read_annotations(file, images, check_files=False).images) == 3


def test_a_wrong_image_folder_is_an_error_under_skip_too_and_the_right_one_is_named(tmp_path: Path) -> None:
    file, images = folder_with(tmp_path, GOOD)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "readme.txt").touch()
    for wrong, hint in (
        (tmp_path / "other", f"it is found under '{images}': give that as the image folder."),
        (tmp_path, f"it is found under '{images}': give that as the image folder."),
    ):
        with pytest.raises(DataError) as error:
            read_annotations(file, wrong, on_bad_record="skip")
        assert str(error.value) == f"'{file}': 3 of 3 listed images are not in '{wrong}', first 'a.jpg'; {hint}"


def test_hints_for_file_names_that_do_not_fit_the_folder(tmp_path: Path) -> None:
    def renamed(prefix: str, suffix: str) -> dict[str, Any]:
        return changed(
            lambda d: [r.update(file_name=prefix + r["file_name"].replace(".jpg", suffix)) for r in d["images"]]
        )

    file, images = folder_with(tmp_path, renamed("images/", ".jpg"))
    with pytest.raises(DataError, match=f"first 'images/a.jpg'; it is found under '{tmp_path}': give that as the"):
        read_annotations(file, images)
    file, images = folder_with(tmp_path, renamed("train2017/", ".jpg"))
    with pytest.raises(
        DataError, match=f"'{images / 'a.jpg'}' has the same name: change the file_name entries to match, or the image"
    ):
        read_annotations(file, images)
    file, images = folder_with(tmp_path, renamed("", ".png"))
    with pytest.raises(DataError, match=f"'{images / 'a.jpg'}' differs in its ending only: correct the file_name"):
        read_annotations(file, images)


def test_files_in_sub_folders_are_found(tmp_path: Path) -> None:
    document = changed(lambda d: d["images"][0].update(file_name="deep/er/a.jpg"))
    file, images = folder_with(tmp_path, document)
    (images / "deep" / "er").mkdir(parents=True)
    (images / "a.jpg").rename(images / "deep" / "er" / "a.jpg")
    assert all(record.path.is_file() for record in read_annotations(file, images).images)


# ---- two files with one set of classes ------------------------------------------------------------------------------


def test_a_validation_file_is_numbered_like_the_training_file(tmp_path: Path) -> None:
    train = read(tmp_path, GOOD)
    fewer = {**GOOD, "categories": [GOOD["categories"][0]], "annotations": [GOOD["annotations"][0]]}
    assert read(tmp_path, fewer).labels.tolist() == [0]
    assert read(tmp_path, fewer, categories_of=train).labels.tolist() == [1]
    other = {**GOOD, "categories": [{"id": 9, "name": "cow"}, {"id": 4, "name": "dog"}]}
    with pytest.raises(
        DataError, match=r"category 9 is 'cow' in '.*' but 'cat' in '.*'; use the same categories in both"
    ):
        read(tmp_path, other, categories_of=train)
    more = {**GOOD, "categories": [*GOOD["categories"], {"id": 5, "name": "cow"}]}
    with pytest.raises(DataError, match=r"lists category 5 'cow', which '.*' doesn't; use the same categories in both"):
        read(tmp_path, more, categories_of=train)
