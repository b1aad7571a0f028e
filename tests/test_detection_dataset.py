"""Samples and batches of the detection dataset: shapes, flips, bad images, workers, the cache."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from fasttrain.errors import ConfigError, DataError
from fasttrain.order import EpochOrder, SampleKey
from fasttrain.recipes.image_sets.files import load_image
from fasttrain.recipes.retinanet import dataset as dataset_module
from fasttrain.recipes.retinanet.coco import DetectionSet, read_annotations
from fasttrain.recipes.retinanet.dataset import Batch, DetectionDataset, collate, flips
from fasttrain.recipes.retinanet.resize import resize, scale_boxes

SIZE = (32, 48)


@pytest.fixture
def small_set(tmp_path: Path) -> DetectionSet:
    """Six images of several sizes: image i has i boxes, number 2 has a crowd box besides."""
    random = np.random.default_rng(0)
    images, annotations = [], []
    for i in range(6):
        width, height = 60 + 10 * i, 40 + 5 * i
        pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i}.jpg")
        images.append({"id": i, "file_name": f"{i}.jpg", "width": width, "height": height})
        annotations += [{"image_id": i, "category_id": k % 3, "bbox": [3 * k + 1, k, 10, 12]} for k in range(i)]
    annotations.append({"image_id": 2, "category_id": 1, "bbox": [0, 0, 50, 40], "iscrowd": 1})
    categories = [{"id": k, "name": f"class {k}"} for k in range(3)]
    file = tmp_path / "set.json"
    file.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
    return read_annotations(file, tmp_path)


def make(detection_set: DetectionSet, **options: Any) -> DetectionDataset:
    return DetectionDataset(detection_set, SIZE, **{"max_boxes": 5, "augment": False, **options})


def equal(first: Batch, second: Batch) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_batch_has_static_shapes_and_padding(small_set: DetectionSet) -> None:
    batch = collate(make(small_set).__getitems__([0, 3, 5]))
    assert {name: (value.dtype, tuple(value.shape)) for name, value in batch.items()} == {
        "images": (torch.uint8, (3, 3, 32, 48)),
        "boxes": (torch.float32, (3, 5, 4)),
        "labels": (torch.int64, (3, 5)),
        "box_count": (torch.int64, (3,)),
        "image_id": (torch.int64, (3,)),
        "original_size": (torch.int64, (3, 2)),
        "bad_image_id": (torch.int64, (3,)),
    }
    assert all(value.is_contiguous() for value in batch.values())
    assert batch["box_count"].tolist() == [0, 3, 5]
    assert batch["labels"].tolist() == [[-1] * 5, [0, 1, 2, -1, -1], [0, 1, 2, 0, 1]]
    assert (batch["boxes"][0] == 0).all()
    assert (batch["boxes"][1, 3:] == 0).all()
    assert batch["image_id"].tolist() == [0, 3, 5]
    assert batch["original_size"].tolist() == [[40, 60], [55, 90], [65, 110]]
    assert batch["bad_image_id"].tolist() == [-1, -1, -1]


def test_pixels_and_boxes_are_those_of_load_resize_and_scale(small_set: DetectionSet) -> None:
    sample = make(small_set)[4]
    record = small_set.images[4]
    assert torch.equal(sample["images"], resize(load_image(record.path), SIZE))
    rows = slice(small_set.first_box[4], small_set.first_box[5])
    expected = scale_boxes(torch.from_numpy(small_set.boxes[rows]), (record.height, record.width), SIZE)
    assert torch.equal(sample["boxes"][:4], expected)


def test_crowd_boxes_are_targets_only_on_request(small_set: DetectionSet) -> None:
    assert make(small_set)[2]["box_count"] == 2
    assert make(small_set, crowd_targets=True)[2]["box_count"] == 3


def test_samples_collate_to_the_same_batch_as_the_batched_fetch(small_set: DetectionSet) -> None:
    dataset = make(small_set, augment=True)
    keys = [SampleKey(3, index) for index in (5, 0, 2)]
    assert equal(collate([dataset[key] for key in keys]), collate(dataset.__getitems__(keys)))


def test_an_index_that_is_not_there(small_set: DetectionSet) -> None:
    with pytest.raises(IndexError):
        make(small_set)[6]


# ---- flips ----------------------------------------------------------------------------------------------------------


def test_a_flip_mirrors_pixels_and_boxes(small_set: DetectionSet) -> None:
    dataset = make(small_set, augment=True, seed=1)
    plain = make(small_set)[4]
    epoch = next(epoch for epoch in range(50) if flips(1, epoch, 4))
    flipped = dataset[SampleKey(epoch, 4)]
    assert torch.equal(flipped["images"], plain["images"].flip(-1))
    x1, y1, x2, y2 = plain["boxes"][:4].unbind(1)
    assert torch.equal(flipped["boxes"][:4], torch.stack((48 - x2, y1, 48 - x1, y2), dim=1))
    assert (flipped["boxes"][4:] == 0).all()
    assert torch.equal(flipped["labels"], plain["labels"])
    epoch = next(epoch for epoch in range(50) if not flips(1, epoch, 4))
    assert equal(dataset[SampleKey(epoch, 4)], plain)


def test_flips_are_a_fair_coin_in_each_argument() -> None:
    draws = np.array([[[flips(s, e, i) for i in range(40)] for e in range(40)] for s in range(20)])
    for axis in range(3):
        others = tuple(a for a in range(3) if a != axis)
        means = draws.mean(axis=others)
        assert np.abs(means - 0.5).max() < 5 * 0.5 / np.sqrt(draws.size / len(means))
        agree = (draws.take(range(1, draws.shape[axis]), axis) == draws.take(range(draws.shape[axis] - 1), axis)).mean()
        assert abs(agree - 0.5) < 0.02


@pytest.mark.parametrize("cache", ["none", "ram"])
def test_workers_and_batch_size_change_nothing(small_set: DetectionSet, cache: Any) -> None:
    def epoch(workers: int, batch_size: int) -> list[Batch]:
        dataset = make(small_set, augment=True, seed=5, cache=cache)
        order = EpochOrder(len(dataset), shuffle=True, seed=5)
        order.set_epoch(2)
        loader = DataLoader(dataset, batch_size, sampler=order, num_workers=workers, collate_fn=collate)
        return list(loader)

    alone, shared = epoch(0, 3), epoch(2, 2)
    assert [len(batch["image_id"]) for batch in shared] == [2, 2, 2]
    for name in alone[0]:
        assert torch.equal(torch.cat([b[name] for b in alone]), torch.cat([b[name] for b in shared]))


# ---- bad images -----------------------------------------------------------------------------------------------------


def test_a_bad_image_is_an_error_by_default(small_set: DetectionSet) -> None:
    small_set.images[1].path.write_bytes(b"")
    with pytest.raises(DataError, match=r"1\.jpg' is empty \(0 bytes\); download or copy it again\.$"):
        make(small_set)[1]


def test_a_bad_image_in_a_worker_keeps_its_sentence_at_the_end(small_set: DetectionSet) -> None:
    small_set.images[1].path.write_bytes(b"")
    loader = DataLoader(make(small_set), 2, num_workers=1, collate_fn=collate)
    with pytest.raises(DataError, match=r"1\.jpg' is empty \(0 bytes\); download or copy it again\.\s*$"):
        list(loader)


@pytest.mark.parametrize("cache", ["none", "ram"])
def test_in_training_the_next_usable_image_takes_the_place_of_a_bad_one(small_set: DetectionSet, cache: Any) -> None:
    dataset = make(small_set, augment=True, on_bad_image="skip", cache=cache)
    good = dataset[SampleKey(0, 3)]
    for index in (1, 2):
        small_set.images[index].path.write_bytes(b"no image")
    for _ in range(2):
        batch = dataset.__getitems__([SampleKey(0, 1), SampleKey(0, 3), SampleKey(0, 2)])
        assert batch["image_id"].tolist() == [3, 3, 3]
        assert batch["bad_image_id"].tolist() == [1, -1, 2]
        assert batch["box_count"].tolist() == [3, 3, 3]
        assert equal({name: value[1] for name, value in batch.items()}, good)
        expected = good["images"].flip(-1) if flips(0, 0, 1) != flips(0, 0, 3) else good["images"]
        assert torch.equal(batch["images"][0], expected)
    unflipped = make(small_set, on_bad_image="skip", substitute=True, cache=cache)
    assert unflipped[1]["image_id"] == 3
    assert "is no image in a known format" in dataset.fault(1)
    assert dataset.fault(3) == ""


@pytest.mark.parametrize("cache", ["none", "ram"])
def test_in_evaluation_a_bad_image_is_blank_and_flagged(small_set: DetectionSet, cache: Any) -> None:
    dataset = make(small_set, on_bad_image="skip", cache=cache)
    small_set.images[4].path.write_bytes(b"no image")
    for _ in range(2):
        batch = dataset.__getitems__([4, 5])
        assert batch["image_id"].tolist() == [4, 5]
        assert batch["bad_image_id"].tolist() == [4, -1]
        assert batch["box_count"].tolist() == [0, 5]
        assert (batch["images"][0] == 0).all()
        assert (batch["boxes"][0] == 0).all()
        assert (batch["labels"][0] == -1).all()
    assert len(small_set.to_coco()["annotations"]) == 16


def test_an_image_of_another_size_than_annotated_is_bad(small_set: DetectionSet) -> None:
    Image.new("RGB", (9, 9)).save(small_set.images[0].path)
    with pytest.raises(DataError, match="is 9 x 9 pixels, but its annotation says 60 x 40"):
        make(small_set)[0]
    assert make(small_set, on_bad_image="skip")[0]["bad_image_id"] == 0


def test_a_set_without_a_usable_image_is_an_error_under_skip_too(small_set: DetectionSet) -> None:
    for record in small_set.images:
        record.path.write_bytes(b"")
    with pytest.raises(DataError) as error:
        make(small_set, augment=True, on_bad_image="skip")[SampleKey(0, 1)]
    assert str(error.value) == (
        f"'{small_set.images[1].path}' and the 5 images after it can't be used; replace them, or set "
        "data.on_bad_image=error to see what is wrong with the first."
    )


# ---- capacity and cache ---------------------------------------------------------------------------------------------


def test_more_boxes_than_max_boxes_is_said_before_training_with_the_value_that_works(small_set: DetectionSet) -> None:
    with pytest.raises(DataError) as error:
        make(small_set, max_boxes=3)
    assert str(error.value) == (
        f"'{small_set.file}': image '5.jpg' has 5 boxes (and 1 more images have too many), but data.max_boxes is 3; "
        "set data.max_boxes=5."
    )
    with pytest.raises(
        DataError, match=r"image '5\.jpg' has 5 boxes, but data\.max_boxes is 4; set data\.max_boxes=5\.$"
    ):
        make(small_set, max_boxes=4)
    make(small_set, max_boxes=5)


def test_a_box_that_vanishes_in_the_resize_is_said_before_training(small_set: DetectionSet) -> None:
    small_set.boxes[-1] = [109.99999, 5, 109.99999, 9]
    with pytest.raises(
        DataError, match=r"a box of image '5\.jpg' has no size left when the image is resized to 48 x 32;"
    ):
        make(small_set)


def test_the_cache_decodes_each_image_once(small_set: DetectionSet, monkeypatch: pytest.MonkeyPatch) -> None:
    cached, plain = make(small_set, augment=True, cache="ram"), make(small_set, augment=True)
    keys = [[SampleKey(epoch, index) for index in range(6)] for epoch in range(3)]
    expected = [plain.__getitems__(epoch) for epoch in keys]
    assert equal(cached.__getitems__(keys[0]), expected[0])
    monkeypatch.setattr(dataset_module, "load_image", None)
    assert equal(cached.__getitems__(keys[1]), expected[1])
    assert equal(cached.__getitems__(keys[2]), expected[2])


def test_what_a_worker_put_into_the_cache_is_there_for_all(small_set: DetectionSet) -> None:
    dataset = make(small_set, cache="ram")
    list(DataLoader(dataset, 3, num_workers=2, collate_fn=collate, multiprocessing_context="fork"))
    for record in small_set.images:
        record.path.unlink()
    assert dataset.__getitems__(range(6))["box_count"].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_cache_beyond_this_machines_memory_is_refused(small_set: DetectionSet) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^data\.cache=ram needs 18000\.0 GB for 6 images of 1000000 x 1000000, but this machine has [\d.]+ GB; "
        r"set data\.cache=none, or a smaller data\.image_size\.$",
    ):
        DetectionDataset(small_set, (10**6, 10**6), 5, augment=False, cache="ram")


def test_real_images_of_odd_sizes_in_one_batch(txl_pbc: Path) -> None:
    found = read_annotations(txl_pbc / "instances_test.json", txl_pbc)
    most = int(np.diff(found.first_box).max())
    dataset = DetectionDataset(found, (96, 96), most, augment=True)
    batch = collate(dataset.__getitems__([SampleKey(1, index) for index in range(0, 144, 9)]))
    assert batch["images"].shape == (16, 3, 96, 96)
    assert batch["images"].float().std() > 10
    real = batch["labels"] >= 0
    assert torch.equal(real.sum(1), batch["box_count"])
    boxes = batch["boxes"][real]
    assert (boxes >= 0).all()
    assert (boxes <= 96).all()
    assert (boxes[:, 2:] > boxes[:, :2]).all()
