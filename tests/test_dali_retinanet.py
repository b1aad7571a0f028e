"""RetinaNet's data through DALI: the torch loader's batches, its order, and its treatment of odd and bad files."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dali_fits import assert_dali_learns_what_torch_learns
from encoded_pictures import jpeg
from PIL import Image

pytest.importorskip("nvidia.dali")

from fasttrain.callbacks import DALIConfig, DALILoader
from fasttrain.callbacks.dali_loader import image_header
from fasttrain.callbacks.dali_loader.reference import TOLERANCE
from fasttrain.errors import ConfigError, DataError, MissingDependencyError
from fasttrain.recipes.image_sets.files import load_image
from fasttrain.recipes.retinanet.data import DataConfig, DetectionData
from fasttrain.recipes.retinanet.resize import resize

SIZE = (32, 48)
CONFIG = DALIConfig(num_threads=1, read_threads=2)
ORIENTED = [8, 1, 3, 6, 2, 5, 7, 4]


def exif(orientation: int) -> Image.Exif:
    block = Image.Exif()
    block[0x0112] = orientation
    block[0x010F] = "a camera"  # a text before it in the directory
    return block


def write_set(folder: Path, files: list[np.ndarray], sizes: list[tuple[int, int]] | None = None) -> dict[str, str]:
    """Write files and annotations, image i with i % 4 boxes; return the data section's paths."""
    images, annotations = [], []
    folder.mkdir()
    for index, data in enumerate(files):
        data.tofile(folder / f"{index}.img")
        height, width = sizes[index] if sizes else load_image(folder / f"{index}.img").shape[1:]
        images.append({"id": index, "file_name": f"{index}.img", "width": width, "height": height})
        annotations += [
            {"image_id": index, "category_id": k % 2, "bbox": [2 * k + 1, k, 9, 11]} for k in range(index % 4)
        ]
    categories = [{"id": 0, "name": "a"}, {"id": 1, "name": "b"}]
    file = folder / "set.json"
    file.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
    paths = {"images": str(folder), "annotations": str(file)}
    return {f"{split}_{kind}": path for split in ("train", "val") for kind, path in paths.items()}


def both(paths: dict[str, str], **options: Any) -> tuple[DetectionData, DetectionData]:
    """Return the set by torch's loader and by DALI's."""
    config = DataConfig(**paths, **{"image_size": SIZE, "batch_size": 3, "max_boxes": 4, "num_workers": 0, **options})
    plain = DetectionData(config)
    plain.setup("fit")
    ours = plain.with_dali_loader(CONFIG)
    ours.setup("fit")
    assert ours.config.loader == "dali"
    return plain, ours


def assert_same_batches(plain: DetectionData, ours: DetectionData, split: str, epochs: int = 2) -> int:
    """Compare all batches of a split, and return how many samples there were."""
    largest, mean = TOLERANCE["cpu"]
    loaders = [getattr(data, f"{split}_dataloader")() for data in (plain, ours)]
    assert isinstance(loaders[1], DALILoader)
    assert len(loaders[0]) == len(loaders[1])
    count = 0
    for epoch in range(epochs):
        for loader in loaders:
            loader.sampler.set_epoch(epoch)
        for wanted, found in zip(*loaders, strict=True):
            assert list(wanted) == list(found)
            for name in wanted:
                if name != "images":
                    assert wanted[name].dtype == found[name].dtype
                    assert torch.equal(wanted[name], found[name]), name
            assert found["images"].shape == wanted["images"].shape
            apart = (found["images"].float() - wanted["images"].float()).abs()
            assert apart.max() <= largest
            assert apart.mean() <= mean
            count += len(apart)
    return count


PLAIN_FILES = [jpeg(index, 30 + index, 50 - index) for index in range(11)]


@pytest.mark.parametrize("flip", [False, True])
def test_the_same_samples_in_the_same_order_with_the_same_flips(tmp_path: Path, flip: bool) -> None:
    plain, ours = both(write_set(tmp_path / "set", PLAIN_FILES), flip=flip, seed=4)
    assert assert_same_batches(plain, ours, "train") == 2 * 9
    assert assert_same_batches(plain, ours, "val") == 2 * 11
    mirrored = [ours._datasets["train"].flipped([(0, index)])[0] for index in range(11)]  # type: ignore[list-item]
    assert any(mirrored) == flip


def test_files_of_other_kinds_give_the_torch_loaders_pixels(tmp_path: Path) -> None:
    deep = np.random.default_rng(0).integers(0, 2**16, (20, 30), dtype=np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    files = [
        jpeg(0, mode="L"), jpeg(1, mode="CMYK"), jpeg(2, progressive=True), jpeg(3, subsampling=0),
        jpeg(4, format="PNG"), jpeg(5, format="PNG", mode="P"), jpeg(6, format="GIF", mode="P"),
        jpeg(7, format="WEBP"), jpeg(8, format="BMP"), np.fromfile(tmp_path / "deep.png", np.uint8),
        jpeg(9, format="TIFF"), jpeg(10, format="PNG", exif=exif(6)),
    ]  # fmt: skip
    plain, ours = both(write_set(tmp_path / "set", files))
    assert_same_batches(plain, ours, "val", epochs=1)


@pytest.mark.parametrize("annotated", ["turned", "as stored"])
def test_exif_orientation_is_judged_by_the_annotated_size(tmp_path: Path, annotated: str) -> None:
    files = [jpeg(index, 30, 40, exif=exif(value)) for index, value in enumerate(ORIENTED)]
    sizes = [(40, 30) if value >= 5 and annotated == "turned" else (30, 40) for value in ORIENTED]
    plain, ours = both(write_set(tmp_path / "set", files, sizes))
    assert_same_batches(plain, ours, "val", epochs=1)
    assert [image_header(file).orientation for file in files] == ORIENTED  # type: ignore[union-attr]


def test_a_header_is_read_or_left_to_others() -> None:
    file = jpeg(0, 30, 40)
    header = image_header(file)
    assert header is not None
    assert (header.height, header.width, header.orientation, header.is_whole) == (30, 40, 1, True)
    assert image_header(jpeg(0, 30, 40, format="PNG")) == header
    cut = image_header(file[:-2])
    assert cut is not None
    assert not cut.is_whole
    for length in range(0, 120, 7):
        image_header(file[:length])
    assert image_header(file[:100]) is None
    assert image_header(jpeg(0, mode="CMYK")) is None
    damaged = file.copy()
    damaged[5] = 0  # a segment of no length
    damaged[4] = 0
    assert image_header(damaged) is None
    broken = jpeg(0, exif=exif(6))
    place = broken.tobytes().index(b"Exif\0\0") + 6
    broken[place + 4 : place + 8] = 255  # the directory lies outside the block
    header = image_header(broken)
    assert header is not None
    assert header.orientation == 1


# ---- bad files ------------------------------------------------------------------------------------------------------

BAD = {
    "empty": np.zeros(0, np.uint8),
    "cut": PLAIN_FILES[4][:300],
    "no image": np.frombuffer(b"no image " * 9, np.uint8),
    "zeros in a whole file": np.concatenate([PLAIN_FILES[4][:700], np.zeros(60, np.uint8), PLAIN_FILES[4][-2:]]),
}


def spoil(paths: dict[str, str], *indices: int, data: np.ndarray) -> None:
    for index in indices:
        data.tofile(Path(paths["train_images"]) / f"{index}.img")


@pytest.mark.parametrize("kind", ["empty", "cut", "no image"])
def test_a_bad_image_is_the_same_error(tmp_path: Path, kind: str) -> None:
    paths = write_set(tmp_path / "set", PLAIN_FILES)
    spoil(paths, 4, data=BAD[kind])
    said = []
    for data in both(paths):
        with pytest.raises(DataError) as error:
            list(data.val_dataloader())
        said.append(str(error.value))
    assert said[0] == said[1]
    assert "4.img" in said[0]


def test_an_image_of_another_size_is_the_same_error(tmp_path: Path) -> None:
    paths = write_set(tmp_path / "set", PLAIN_FILES)
    spoil(paths, 4, data=jpeg(0, 8, 8))
    _, ours = both(paths)
    with pytest.raises(DataError, match=r"4\.img' is 8 x 8 pixels, but its annotation says 46 x 34"):
        list(ours.val_dataloader())


@pytest.mark.parametrize("kind", BAD)
def test_skip_means_what_it_means_for_the_torch_loader(tmp_path: Path, kind: str) -> None:
    paths = write_set(tmp_path / "set", PLAIN_FILES)
    spoil(paths, 4, 5, data=BAD[kind])
    plain, ours = both(paths, on_bad_image="skip")
    if kind.startswith("zeros"):  # torch's decoder makes grey of what is missing, and DALI's refuses it
        assert list(plain.val_dataloader())
        for loader in (ours.train_dataloader(), ours.val_dataloader()):
            assert sum(len(batch["images"]) for batch in loader) in (9, 11)
        return
    assert_same_batches(plain, ours, "train")
    assert_same_batches(plain, ours, "val")
    for data in (plain, ours):  # a Trainer's way with a batch, by which torch's are counted
        for batch in data.train_dataloader():
            data.on_before_batch_transfer(batch, 0)
    (sentence,) = {key.removeprefix("val: ") for key in ours.bad_samples() if key.startswith("val")}
    assert sentence == "images that can't be used, the first of them '4.img'"
    assert plain.bad_samples()[f"train: {sentence}"] == ours.bad_samples()[f"train: {sentence}"] == 2


# ---- configuration --------------------------------------------------------------------------------------------------


def test_device_and_share_are_the_trainers(tmp_path: Path) -> None:
    _, ours = both(write_set(tmp_path / "set", PLAIN_FILES), batch_size=2)
    strategy = SimpleNamespace(root_device=torch.device("cuda", 1))
    ours.trainer = SimpleNamespace(strategy=strategy, global_rank=1, world_size=3)  # type: ignore[assignment]
    for loader, length in ((ours.train_dataloader(), 1), (ours.val_dataloader(), 2)):
        assert isinstance(loader, DALILoader)
        assert loader.device == torch.device("cuda", 1)
        assert (loader.order.rank, loader.order.num_replicas) == (1, 3)
        assert len(loader) == length


def test_a_cache_is_the_torch_loaders_own() -> None:
    with pytest.raises(
        ConfigError, match=r"^data\.cache=ram keeps images of the torch loader, and data\.loader is dali"
    ):
        DataConfig(loader="dali", cache="ram")


def test_without_dali_the_error_has_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(MissingDependencyError) as error:
        DetectionData(DataConfig(loader="dali"))
    assert "pip install 'fasttrain[dali]', or use the torch loader." in str(error.value)
    assert DetectionData(DataConfig()).config.loader == "torch"


def test_what_the_dataset_shows_is_what_resize_gives(tmp_path: Path) -> None:
    """The floor of the comparison above: both loaders' images are those of the files."""
    paths = write_set(tmp_path / "set", PLAIN_FILES)
    _, ours = both(paths)
    batch = next(iter(ours.val_dataloader()))
    wanted = resize(load_image(Path(paths["val_images"]) / "1.img"), SIZE)
    assert (batch["images"][1].int() - wanted.int()).abs().max() <= 1


# ---- through the whole flow -----------------------------------------------------------------------------------------


def test_a_run_by_dali_learns_what_a_run_by_torch_learns_and_resumes(tmp_path: Path) -> None:
    tiny = ["data.generated.train_images=24", "data.generated.val_images=4", "data.batch_size=8", "data.cache=none"]
    assert_dali_learns_what_torch_learns("retinanet", tiny, tmp_path)
    assert (tmp_path / "dali" / "samples" / "contact-sheet.png").is_file()
