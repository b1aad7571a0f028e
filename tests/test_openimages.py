"""OpenImages boxes become the COCO file of MLPerf's RetinaNet benchmark, read back by our own reader."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from fasttrain.errors import DataError
from fasttrain.recipes.retinanet.coco import read_annotations
from fasttrain.recipes.retinanet.openimages import (
    MLPERF_CLASSES,
    Conversion,
    app,
    convert,
    leaf_classes,
    read_class_list,
)

HEADER = "ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax,IsOccluded,IsTruncated,IsGroupOf,IsDepiction,IsInside"
BOXES = """
bbbb,xclick,/m/apple,1,0.25,0.75,0.1,0.6,0,1,0,0,0
bbbb,xclick,/m/tree,1,0.25,0.75,0.1,0.6,0,0,0,0,0
aaaa,activemil,/m/banana,1,0,1,0,0.5,-1,-1,-1,-1,-1
cccc,xclick,/m/tree,1,0,1,0,1,0,0,0,0,0
aaaa,xclick,/m/apple,1,0.5,0.625,0.5,1,0,0,1,0,0
"""
DESCRIPTIONS = "/m/apple,Apple\n/m/banana,Banana\n/m/tree,Tree\n/m/fruit,Fruit\n/m/pear,Pear\n"
HIERARCHY = {
    "LabelName": "/m/entity",
    "Subcategory": [
        {"LabelName": "/m/fruit", "Subcategory": [{"LabelName": "/m/apple"}, {"LabelName": "/m/banana"}]},
        {"LabelName": "/m/tree", "Part": [{"LabelName": "/m/pear"}]},
    ],
}


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Path]:
    """The four inputs of a conversion, under the names of its arguments, and the output."""
    (tmp_path / "boxes.csv").write_text(HEADER + BOXES)
    (tmp_path / "descriptions.csv").write_text(DESCRIPTIONS)
    (tmp_path / "hierarchy.json").write_text(json.dumps(HIERARCHY))
    (tmp_path / "data").mkdir()
    for name, size in {"aaaa": (80, 40), "bbbb": (100, 50), "cccc": (10, 10)}.items():
        Image.new("RGB", size).save(tmp_path / "data" / f"{name}.jpg")
    return {
        "boxes": tmp_path / "boxes.csv",
        "output": tmp_path / "labels" / "openimages-mlperf.json",
        "descriptions": tmp_path / "descriptions.csv",
        "images": tmp_path / "data",
    }


def run(inputs: dict[str, Path], **options: Any) -> Conversion:
    return convert(**{"classes": ["Apple", "Banana", "Pear"], **inputs, **options})


def test_the_layout_is_that_of_the_benchmarks_file(inputs: dict[str, Path]) -> None:
    result = run(inputs)
    assert result == Conversion(images=2, annotations=3, categories=3, missing=0, unused=("Pear",))
    assert str(result) == "2 images, 3 boxes, 3 classes (1 of them without a box)"
    written = json.loads(inputs["output"].read_text())
    assert list(written) == ["info", "licenses", "categories", "images", "annotations"]
    assert written["categories"] == [
        {"id": 0, "name": "Apple", "supercategory": None},
        {"id": 1, "name": "Banana", "supercategory": None},
        {"id": 2, "name": "Pear", "supercategory": None},
    ]
    assert written["images"] == [
        {"id": 1, "file_name": "aaaa.jpg", "height": 40, "width": 80, "license": None, "coco_url": None},
        {"id": 2, "file_name": "bbbb.jpg", "height": 50, "width": 100, "license": None, "coco_url": None},
    ]
    attributes = {
        "IsOccluded": False,
        "IsTruncated": False,
        "IsGroupOf": False,
        "IsDepiction": False,
        "IsInside": False,
    }
    assert written["annotations"] == [
        {"id": 1, "image_id": 2, "category_id": 0, "bbox": [25, 5, 50, 25], "area": 1250, "iscrowd": 0}
        | {**attributes, "IsTruncated": True},
        {"id": 2, "image_id": 1, "category_id": 1, "bbox": [0, 0, 80, 20], "area": 1600, "iscrowd": 1}
        | dict.fromkeys(attributes, True),
        {"id": 3, "image_id": 1, "category_id": 0, "bbox": [40, 20, 10, 20], "area": 200, "iscrowd": 1}
        | {**attributes, "IsGroupOf": True},
    ]


def test_the_file_is_read_back_by_our_own_reader(inputs: dict[str, Path]) -> None:
    run(inputs)
    found = read_annotations(inputs["output"], inputs["images"])
    assert found.category_names == ("Apple", "Banana", "Pear")
    assert found.boxes.tolist() == [[0, 0, 80, 20], [40, 20, 50, 40], [25, 5, 75, 30]]
    assert found.iscrowd.tolist() == [True, True, False]


def test_mlperfs_classes() -> None:
    assert len(MLPERF_CLASSES) == len(set(MLPERF_CLASSES)) == 264
    assert list(MLPERF_CLASSES) == sorted(MLPERF_CLASSES)
    assert MLPERF_CLASSES[0] == "Airplane"
    assert MLPERF_CLASSES[-1] == "Zucchini"
    assert "Kitchen & dining room table" in MLPERF_CLASSES


def test_leaf_classes_have_no_subclasses_but_may_have_parts(inputs: dict[str, Path], tmp_path: Path) -> None:
    def leaves(min_boxes: int) -> list[str]:
        return leaf_classes(
            inputs["boxes"],
            descriptions=inputs["descriptions"],
            hierarchy=tmp_path / "hierarchy.json",
            min_boxes=min_boxes,
        )

    assert leaves(1) == ["Apple", "Banana", "Tree"]
    assert leaves(2) == ["Apple", "Tree"]
    (tmp_path / "hierarchy.json").write_text("[1]")
    with pytest.raises(DataError, match="is no class hierarchy: nested LabelName and Subcategory are needed"):
        leaves(1)


def test_a_class_list_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "classes.txt"
    file.write_text("# fruit\nBanana\n\nApple\n")
    assert read_class_list(file) == ["Banana", "Apple"]
    file.write_text("Apple\nApple\n")
    with pytest.raises(DataError, match=r"classes\.txt' names 'Apple' twice; one class name a line is needed\.$"):
        read_class_list(file)
    file.write_text("# nothing\n")
    with pytest.raises(DataError, match=r"classes\.txt' names no class; one class name a line is needed\.$"):
        read_class_list(file)
    with pytest.raises(DataError, match=r"there is no file '.*x\.txt'; check the path\.$"):
        read_class_list(tmp_path / "x.txt")


def test_missing_and_unreadable_images(inputs: dict[str, Path]) -> None:
    (inputs["images"] / "aaaa.jpg").write_bytes(b"no image")
    with pytest.raises(DataError) as error:
        run(inputs)
    assert str(error.value) == (
        f"1 of the 2 images with boxes of these classes are missing or unreadable in '{inputs['images']}', first "
        "'aaaa.jpg'; download them, or leave them out with --skip-missing."
    )
    result = run(inputs, on_missing="skip")
    assert (result.images, result.annotations, result.missing) == (1, 1, 1)
    assert json.loads(inputs["output"].read_text())["images"][0]["file_name"] == "bbbb.jpg"


def test_faulty_inputs(inputs: dict[str, Path]) -> None:
    with pytest.raises(DataError, match=r"descriptions\.csv' has no class 'Aple'; did you mean 'Apple'\?$"):
        run(inputs, classes=["Aple"])
    with pytest.raises(DataError, match=r"boxes\.csv' has no box of any of the 1 classes; is it the file of boxes\?$"):
        run(inputs, classes=["Pear"])
    with pytest.raises(DataError, match=r"x\.csv' can't be read: No such file or directory\.$"):
        run(inputs, boxes=inputs["boxes"].with_name("x.csv"))
    with pytest.raises(DataError, match=r"hierarchy\.json' describes no class; lines such as '/m/014j1m,Apple' are"):
        run(inputs, descriptions=inputs["descriptions"].with_name("hierarchy.json"))
    with pytest.raises(
        DataError, match=r"descriptions\.csv' has no column 'ImageID'; the columns ImageID, LabelName, "
    ):
        run(inputs, boxes=inputs["descriptions"])
    inputs["boxes"].write_text(HEADER + BOXES + "aaaa,xclick,/m/app")
    with pytest.raises(DataError, match=r"boxes\.csv', line 7: 3 of 13 columns; is the file cut off\?$"):
        run(inputs)


@pytest.mark.parametrize("value", ["x", "nan"])
def test_a_box_that_is_no_number_leaves_no_half_written_file(inputs: dict[str, Path], value: str) -> None:
    inputs["boxes"].write_text(HEADER + BOXES.replace("0.625", value))
    with pytest.raises(
        DataError, match=rf"a box of image aaaa: XMin=0\.5, XMax={value}, YMin=0\.5, .*must be numbers\.$"
    ):
        run(inputs)
    assert list(inputs["output"].parent.iterdir()) == []


def test_an_output_that_cannot_be_written(inputs: dict[str, Path]) -> None:
    with pytest.raises(DataError, match=r"boxes\.csv/x\.json' can't be written: "):
        run(inputs, output=inputs["boxes"] / "x.json")


def test_command_line(inputs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("Apple\nBanana\n")
    options = ["--descriptions", inputs["descriptions"], "--images", inputs["images"]]
    arguments = [str(item) for item in (inputs["boxes"], inputs["output"], *options)]
    result = CliRunner().invoke(app, [*arguments, "--classes", str(tmp_path / "classes.txt")])
    assert result.exit_code == 0
    assert result.output.strip().endswith("openimages-mlperf.json: 2 images, 3 boxes, 2 classes")
    result = CliRunner().invoke(app, [*arguments, "--hierarchy", str(tmp_path / "hierarchy.json"), "--min-boxes", "2"])
    assert result.output.strip().endswith("3 images, 4 boxes, 2 classes")
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "has no class 'Airplane'" in result.output
