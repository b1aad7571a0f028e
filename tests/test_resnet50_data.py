"""The ResNet recipe's data: the generated set, folders, windows, flips, bad images, workers, evaluation's padding."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import v2

from fasttrain.callbacks import labelled_images
from fasttrain.errors import ConfigError, DataError
from fasttrain.order import EvaluationOrder, SampleKey
from fasttrain.recipes.image_sets.files import load_image
from fasttrain.recipes.resnet50.data import ClassificationData, DataConfig
from fasttrain.recipes.resnet50.dataset import Augmentation, ClassificationDataset, mix_shares
from fasttrain.recipes.resnet50.drawing import GeneratedConfig, draw
from fasttrain.recipes.resnet50.generated import generate

SMALL = GeneratedConfig(train_images=41, val_images=20, image_size=40)
AUGMENTATION = Augmentation(seed=3, area=(0.2, 1.0), aspect=(0.75, 4 / 3), flip=True, mixup=0.0)
KEYS = [SampleKey(epoch, index) for epoch in (0, 1) for index in range(20)]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return generate(tmp_path_factory.mktemp("drawn"), SMALL, processes=1)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes of five images, no two of one size."""
    generator = np.random.default_rng(0)
    for index in range(10):
        folder = tmp_path / "photos" / "ab"[index % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (40 + 7 * index, 90 - 5 * index, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
    return tmp_path / "photos"


def dataset(folder: Path, augmentation: Augmentation | None = None, **options: Any) -> ClassificationDataset:
    return ClassificationDataset(labelled_images(folder), 32, 36, augmentation, **options)


# ---- the generated set ----------------------------------------------------------------------------------------------


def test_generated_set_is_the_same_for_any_number_of_processes(drawn: tuple[Path, Path], tmp_path: Path) -> None:
    again = generate(tmp_path, SMALL, processes=2)
    for one, other in zip(drawn, again, strict=True):
        files = sorted(path.relative_to(one) for path in one.rglob("*.jpg"))
        assert [path.relative_to(other) for path in sorted(other.rglob("*.jpg"))] == files
        assert all((one / path).read_bytes() == (other / path).read_bytes() for path in files)
    assert generate(tmp_path, SMALL, _must_not_draw) == again
    next(again[0].rglob("*.jpg")).unlink()
    generate(tmp_path, SMALL, processes=1)
    assert len(list(again[0].rglob("*.jpg"))) == 41, "a damaged set is drawn anew"


def test_generated_classes_are_shapes_with_textures(drawn: tuple[Path, Path]) -> None:
    train, val = (labelled_images(folder) for folder in drawn)
    assert train.class_names == val.class_names == SMALL.class_names
    assert len(train.class_names) == 20
    assert {"plain-disc", "striped-star"} <= set(train.class_names)
    assert np.bincount(val.labels).tolist() == [1] * 20
    assert np.bincount(train.labels).max() - np.bincount(train.labels).min() == 1
    assert not np.array_equal(draw(SMALL, "train", 0), draw(SMALL, "val", 0))


@pytest.mark.parametrize("texture", ["plain", "striped", "checked", "dotted"])
def test_textures_are_seen_in_the_middle_of_a_shape(texture: str) -> None:
    """A plain disc is nearly of one colour there, any other has two: medians of 12 were 8 and 51 to 59 grey levels."""
    config = replace(GeneratedConfig(), max_distractors=0, noise=0.0)
    names = config.class_names
    places = range(names.index(f"{texture}-disc"), 12 * len(names), len(names))
    spread = [draw(config, "train", index)[28:44, 28:44].std(axis=(0, 1)).max() for index in places]
    assert (np.median(spread) < 25) == (texture == "plain")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"shapes": ("disk",)}, "generated.shapes: nothing is called 'disk'; did you mean 'disc'?"),
        ({"textures": ()}, "generated.textures must name one or more different ones, not []"),
        ({"image_size": 8}, "generated.image_size is 8; shapes can't be told apart below 32 pixels"),
        (
            {"val_images": 19},
            "generated: 19 images were asked for; each split has 20 (one of each class) to 999999",
        ),
        ({"max_size": 2.0}, "generated: sizes 0.5 to 2.0; 0.05 <= min <= max <= 1 is needed"),
    ],
)
def test_undrawable_config_is_one_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GeneratedConfig(**values)
    assert str(caught.value) == sentence


# ---- folders --------------------------------------------------------------------------------------------------------


def test_folders_are_read_as_imagefolder_does(photos: Path) -> None:
    from torchvision.datasets import ImageFolder

    theirs, ours = ImageFolder(str(photos)), labelled_images(photos)
    paths = [ours.encoded.name(index) for index in range(len(ours))]
    assert list(zip(paths, ours.labels.tolist(), strict=True)) == theirs.samples
    assert list(ours.class_names) == theirs.classes


def test_evaluation_is_numbered_by_the_training_sets_classes(photos: Path) -> None:
    assert set(labelled_images(photos / "..", class_names=("other", "photos")).labels.tolist()) == {1}


def test_faulty_folders(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "empty" / "a").mkdir(parents=True)
    for folder, names, sentence in (
        (tmp_path / "no", None, f"the folder '{tmp_path}/no' can't be read: No such file or directory."),
        (tmp_path / "empty" / "a", None, f"'{tmp_path}/empty/a' has no subfolders; a folder for each class is needed, "
         "with its images in it."),
        (photos, ("a", "bb"), f"'{photos}' has a class 'b' that the training set lacks; did you mean 'bb'?"),
    ):  # fmt: skip
        with pytest.raises(DataError) as caught:
            labelled_images(folder, class_names=names)
        assert str(caught.value) == sentence
    with pytest.raises(DataError, match=r"^the class folder '.*/empty/a' has no images \(.*\.jpg.*\); fill or"):
        labelled_images(tmp_path / "empty")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"train": "x"}, "data.val is not set, but data.train is: give both, or none for the generated set."),
        ({"batch_size": 0}, "data.batch_size is 0; it must be at least 1."),
        (
            {"resize": 200},
            "data.resize is 200, but images of 224 pixels are cut out of it; take at least 224.",
        ),
        (
            {"crop_area": (0.5, 1.5)},
            "data.crop_area is [0.5, 1.5]; two numbers, 0 < least <= largest, are needed.",
        ),
        ({"mixup": -1.0}, "data.mixup is -1.0; it must be at least 0."),
    ],
)
def test_impossible_values(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DataConfig(**values)
    assert str(caught.value) == sentence


# ---- what is made of an image ---------------------------------------------------------------------------------------


def test_evaluation_equals_torchvisions_resize_and_centre_crop(photos: Path) -> None:
    ours = dataset(photos)
    transform = v2.Compose([v2.Resize(36, antialias=True), v2.CenterCrop(32)])
    for index in range(len(ours)):
        path = ours.images.encoded.name(index)
        assert torch.equal(ours[index]["images"], transform(load_image(path))), path


def test_augmentation_depends_on_seed_epoch_and_index_alone(photos: Path) -> None:
    data = dataset(photos, AUGMENTATION)
    keys = [key for key in KEYS if key.index < 10]
    whole = data.__getitems__(keys)["images"]
    one_by_one = torch.stack([data[key]["images"] for key in reversed(keys)]).flip(0)
    assert torch.equal(whole, one_by_one)
    assert not torch.equal(whole[:10], whole[10:]), "another epoch, other windows"
    other = dataset(photos, replace(AUGMENTATION, seed=4)).__getitems__(keys)["images"]
    assert not torch.equal(whole, other)


def test_half_of_the_visits_are_mirrored(photos: Path) -> None:
    """With the whole of a square image as the only window, a sample is the image or its mirror image."""
    (photos / "c").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(photos / "c" / "square.png")
    data = dataset(photos, replace(AUGMENTATION, area=(1.0, 1.0), aspect=(1.0, 1.0)))
    plain = torch.from_numpy(pixels).permute(2, 0, 1)
    mirrored = 0
    for epoch in range(200):
        seen = data[SampleKey(epoch, 10)]["images"]
        is_mirrored = torch.equal(seen, plain.flip(-1))
        assert is_mirrored or torch.equal(seen, plain)
        mirrored += is_mirrored
    assert 70 < mirrored < 130


def test_mixing_shares_are_betas(photos: Path) -> None:
    keys = [SampleKey(0, index) for index in range(2000)]
    shares = mix_shares(keys, replace(AUGMENTATION, mixup=0.4))
    assert shares.dtype == np.float32
    assert shares.mean() == pytest.approx(0.5, abs=0.03)
    assert shares.var() == pytest.approx(1 / (4 * (2 * 0.4 + 1)), rel=0.1)
    assert np.array_equal(shares[5:9], mix_shares(keys[5:9], replace(AUGMENTATION, mixup=0.4)))
    assert "mix" in dataset(photos, replace(AUGMENTATION, mixup=0.4)).__getitems__(KEYS[:4])
    assert "mix" not in dataset(photos, AUGMENTATION).__getitems__(KEYS[:4])


def test_bad_images(photos: Path) -> None:
    bad = photos / "a" / "4.png"  # the third of its class
    bad.write_bytes(b"")
    with pytest.raises(DataError, match=r"4\.png' is empty"):
        dataset(photos)[2]
    shown = dataset(photos, AUGMENTATION, on_bad_image="skip").__getitems__([SampleKey(0, 2), SampleKey(0, 3)])
    assert shown["bad_image_id"].tolist() == [2, -1]
    assert shown["images"][0].any(), "in training the next image takes its place"
    scored = dataset(photos, on_bad_image="skip").__getitems__([SampleKey(0, 2), SampleKey(0, 3)])
    assert scored["bad_image_id"].tolist() == [2, -1]
    assert not scored["images"][0].any(), "in evaluation it is blank"
    assert scored["labels"].tolist() == [0, 0]
    data = ClassificationData(DataConfig(train=str(photos), val=str(photos), image_size=32, on_bad_image="skip"))
    data.setup("fit")
    data.on_before_batch_transfer(scored, 0)
    assert data.bad_samples() == {f"train: images that can't be used, the first of them '{bad}'": 1}


# ---- evaluation -----------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 7))
def test_every_sample_is_evaluated_once_in_whole_batches(size: int, ranks: int, batch: int) -> None:
    orders = [EvaluationOrder(size, rank=rank, world_size=ranks, batch_size=batch) for rank in range(ranks)]
    shares = [[key.index for key in order] for order in orders]
    assert {len(share) for share in shares} == {len(orders[0])}, "as many on each rank"
    assert len(orders[0]) % batch == 0
    assert sorted(index for share in shares for index in share if index < size) == list(range(size))
    assert all(index <= size for share in shares for index in share)


def test_a_key_of_no_sample_has_no_label(photos: Path) -> None:
    batch = dataset(photos).__getitems__([SampleKey(0, 9), SampleKey(0, 10)])
    assert batch["labels"].tolist() == [1, -1]
    assert batch["bad_image_id"].tolist() == [-1, -1]
    assert not batch["images"][1].any()


def test_loaders_give_the_same_batches_with_workers(drawn: tuple[Path, Path]) -> None:
    def batches(workers: int) -> list[dict[str, torch.Tensor]]:
        train, val = (str(folder) for folder in drawn)
        config = DataConfig(train=train, val=val, image_size=32, batch_size=16, num_workers=workers, mixup=0.2)
        data = ClassificationData(config)
        assert data.facts() == {"num_classes": 20, "batch_size": 16}
        return [*data.train_dataloader(), *data.val_dataloader()]

    one, two = batches(0), batches(1)
    assert [len(batch["labels"]) for batch in one] == [16] * (2 + 2), "shapes are static"
    assert sum(int((batch["labels"] >= 0).sum()) for batch in one[2:]) == 20
    for mine, other in zip(one, two, strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) for name in mine)


def _must_not_draw(done: int, total: int) -> None:
    raise AssertionError("the set was drawn again")
