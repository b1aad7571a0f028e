"""The ResNet recipe's data through DALI: the torch loader's batches, from every container, and its bad files."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from dali_fits import assert_dali_learns_what_torch_learns
from encoded_images import bytes_feature, encoded, example, int64_feature, record, write_folder
from PIL import Image

pytest.importorskip("nvidia.dali")

from fasttrain.callbacks import CATALOGUE, DALIConfig, DALILoader
from fasttrain.callbacks.dali_loader.convert import convert
from fasttrain.environment import Hardware
from fasttrain.errors import DataError, MissingDependencyError
from fasttrain.optimization import Applies, Context
from fasttrain.recipes.resnet50.data import ClassificationData, DataConfig

CONFIG = DALIConfig(num_threads=1, read_threads=2)
# Grey levels. On the border of a window torch's filter and DALI's differ: see `test_dali_classification`.
LARGEST, ON_THE_BORDER = 1.01, 12.0


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


def as_mode(mode: str, kind: str, seed: int) -> bytes:
    file = io.BytesIO()
    Image.open(io.BytesIO(encoded(70, 50, seed=seed))).convert(mode).save(file, kind)
    return file.getvalue()


FILES = {
    "ant/0.jpg": encoded(100, 75, seed=0),
    "ant/1.jpg": encoded(60, 90, seed=1, subsampling=0),
    "ant/2.png": encoded(80, 64, kind="PNG", seed=2),
    "bee/3.jpg": encoded(120, 50, seed=3, exif=turned(6)),
    "bee/4.jpg": as_mode("CMYK", "JPEG", 4),
    "bee/5.webp": encoded(66, 70, kind="WEBP", seed=5),
    "cat/6.png": encoded(90, 60, kind="PNG", seed=6, exif=turned(8)),
    "cat/7.jpg": as_mode("L", "JPEG", 7),
    "cat/8.jpg": encoded(51, 52, seed=8, progressive=True),
    "cat/9.jpg": encoded(90, 55, seed=9),
}
LABELS = [0, 0, 0, 1, 1, 1, 2, 2, 2, 2]


def folder(place: Path) -> Path:
    return write_folder(place / "folder", FILES)


def shards(place: Path) -> Path:
    convert(folder(place), place / "shards")
    return place / "shards"


def records(place: Path) -> Path:
    pytest.importorskip("google_crc32c")
    features = [
        {"image/encoded": bytes_feature(data), "image/class/label": int64_feature(label)}
        for data, label in zip(FILES.values(), LABELS, strict=True)
    ]
    place = place / "records"
    return write_folder(place, {"set-00000-of-00001": b"".join(record(example(each)) for each in features)})


def both(place: Path, **options: Any) -> tuple[ClassificationData, ClassificationData]:
    """Return the set at a place by torch's loader and by DALI's."""
    config = DataConfig(
        **{"train": str(place), "val": str(place), "image_size": 32, "batch_size": 3, "num_workers": 0, **options}
    )
    plain = ClassificationData(config)
    plain.setup("fit")
    ours = plain.with_dali_loader(CONFIG)
    ours.setup("fit")
    return plain, ours


def assert_same_batches(plain: ClassificationData, ours: ClassificationData, split: str, epochs: int = 2) -> int:
    """Compare all batches of a split, and return how many rows there were."""
    one, other = (getattr(data, f"{split}_dataloader")() for data in (plain, ours))
    assert isinstance(other, DALILoader)
    assert len(one) == len(other)
    count = 0
    for epoch in range(epochs):
        for loader in (one, other):
            loader.sampler.set_epoch(epoch)
        for wanted, found in zip(one, other, strict=True):
            assert list(wanted) == list(found)
            for name in set(wanted) - {"images"}:
                assert wanted[name].dtype == found[name].dtype
                assert torch.equal(wanted[name], found[name]), name
            assert (found["images"].dtype, found["images"].shape) == (torch.uint8, wanted["images"].shape)
            assert found["images"].is_contiguous(memory_format=torch.channels_last)
            apart = (found["images"].float() - wanted["images"].float()).abs()
            assert apart[..., 1:-1, 1:-1].max() <= LARGEST
            assert apart.max() <= (ON_THE_BORDER if split == "train" else LARGEST)
            count += len(apart)
    return count


@pytest.mark.parametrize("container", [folder, shards, records])
def test_the_same_batches_from_every_container(tmp_path: Path, container: Any) -> None:
    """Order, windows, mirrors, labels and shares of the mixtures; what fills the last evaluation batch has no label."""
    plain, ours = both(container(tmp_path), seed=4, mixup=0.2)
    assert plain._sets["train"].labels.tolist() == LABELS
    assert assert_same_batches(plain, ours, "train") == 2 * 9
    assert assert_same_batches(plain, ours, "val", epochs=1) == 12
    *_, last = ours.val_dataloader()
    assert last["labels"].tolist() == [2, -1, -1]
    assert last["bad_image_id"].tolist() == [-1, -1, -1]
    assert not last["images"][1:].any()


def test_evaluation_is_numbered_by_the_training_sets_classes(tmp_path: Path) -> None:
    train = write_folder(tmp_path / "train", FILES | {"bat/1.jpg": encoded()})
    data = ClassificationData(DataConfig(train=str(train), val=str(shards(tmp_path))))
    data.setup("fit")
    assert data.facts()["num_classes"] == 4
    assert data._sets["val"].labels.tolist() == [0, 0, 0, 2, 2, 2, 3, 3, 3, 3]
    turned_around = ClassificationData(DataConfig(train=str(shards(tmp_path)), val=str(train)))
    with pytest.raises(DataError, match=r"train' has a class 'bat' that the training set lacks; did you mean 'cat'"):
        turned_around.setup("fit")


# ---- bad files ------------------------------------------------------------------------------------------------------

BAD = {"empty": b"", "cut": FILES["bee/3.jpg"][:300], "no image": b"no image " * 9}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_image_is_the_same_error(tmp_path: Path, kind: str) -> None:
    place = folder(tmp_path)
    (place / "bee" / "3.jpg").write_bytes(BAD[kind])
    said = []
    for data in both(place):
        with pytest.raises(DataError) as error:
            list(data.val_dataloader())
        said.append(str(error.value))
    assert said[0] == said[1]
    assert "bee/3.jpg'" in said[0]


@pytest.mark.parametrize("kind", BAD)
def test_skip_means_what_it_means_for_the_torch_loader(tmp_path: Path, kind: str) -> None:
    """The next image with its own class and window in training; in evaluation a black one with the bad one's class."""
    place = folder(tmp_path)
    for name in ("bee/5.webp", "cat/6.png"):
        (place / name).write_bytes(BAD[kind])
    plain, ours = both(place, on_bad_image="skip")
    assert_same_batches(plain, ours, "train", epochs=3)
    assert_same_batches(plain, ours, "val", epochs=1)
    for data in (plain, ours):  # a Trainer's way with a batch, by which torch's are counted
        for batch in data.train_dataloader():
            data.on_before_batch_transfer(batch, 0)
    first = f"images that can't be used, the first of them '{place / 'bee/5.webp'}'"
    assert ours.bad_samples() == {f"train: {first}": 2, f"val: {first}": 2}
    assert plain.bad_samples()[f"train: {first}"] == 2


# ---- through the whole flow -----------------------------------------------------------------------------------------


def test_the_plan_puts_dalis_loaders_in(tmp_path: Path) -> None:
    plain, _ = both(folder(tmp_path))
    one = CATALOGUE["dali_loader"](CONFIG)
    context = Context(torch.nn.Identity(), plain, Hardware("gpu", "cuda:0", "a GPU", 2, (9, 0)))  # type: ignore[arg-type]
    assert isinstance(one.check(context), Applies)
    data = one.attach(context).data
    assert isinstance(data, ClassificationData)
    assert isinstance(data.config.dali, DALIConfig)
    data.setup("fit")
    assert isinstance(data.train_dataloader(), DALILoader)
    assert [change.path for change in one.applied()] == ["data.train_dataloader"]


def test_without_dali_the_error_has_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'fasttrain\[dali\]', or use the torch loader\."):
        ClassificationData(DataConfig(loader="dali"))


def test_a_run_by_dali_learns_what_a_run_by_torch_learns_and_resumes(tmp_path: Path) -> None:
    tiny = [
        "data.generated.train_images=24", "data.generated.val_images=20", "data.generated.image_size=40",
        "data.image_size=32", "data.batch_size=8", "data.mixup=0.2", "module.model.width=0.25",
    ]  # fmt: skip
    assert_dali_learns_what_torch_learns("resnet50", tiny, tmp_path)
