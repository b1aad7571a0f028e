"""Folders become tar shards: the same samples in the same order, the same bytes each time, whole or not there."""

import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from encoded_images import encoded, write_folder

from fasttrain.callbacks.dali_loader import convert as module
from fasttrain.callbacks.dali_loader.convert import convert
from fasttrain.callbacks.dali_loader.labelled import class_folder
from fasttrain.callbacks.dali_loader.tar_shards import labelled_shards, sharded_files
from fasttrain.cli import main
from fasttrain.errors import ConfigError, DataError
from fasttrain.recipes.retinanet.coco import read_annotations


def noise(kilobytes: int, seed: int) -> bytes:
    """Return an image of about that size: a small one with a comment behind its end."""
    return encoded(40, 30, seed=seed) + np.random.default_rng(seed).bytes(kilobytes * 1000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    names = ["cat/1.jpg", "cat/2.v2.jpg", "cat/2_v2.jpg", "cat/2.v2.png", "dog.old/1.jpg", "dog.old/x/1.jpeg"]
    return write_folder(tmp_path / "images", {name: noise(300, n) for n, name in enumerate(names)})


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_shards_of_a_class_folder_have_its_samples_in_its_order(folder: Path, tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    shards = convert(folder, tmp_path / "out", shard_megabytes=1, on_progress=lambda *at: progress.append(at))
    before, after = class_folder(folder), labelled_shards(tmp_path / "out")
    assert [after.encoded.read(index).tobytes() for index in range(len(after))] == [
        before.encoded.read(index).tobytes() for index in range(len(before))
    ]
    assert after.labels.tolist() == before.labels.tolist() == [0, 0, 0, 0, 1, 1]
    assert after.class_names == before.class_names == ("cat", "dog.old")
    assert [shard.name for shard in shards] == ["shard-000000.tar", "shard-000001.tar"]
    assert all(shard.stat().st_size <= 10**6 for shard in shards)
    total = sum(file.stat().st_size for file in folder.rglob("*.*") if file.is_file())
    assert progress[-1] == (total, total)
    assert "cat/2_v2~2.png in" in "".join(after.encoded.name(index) for index in range(6))


def test_each_image_has_its_label_beside_it_as_webdataset_wants(folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "out")
    with tarfile.open(tmp_path / "out" / "shard-000000.tar") as tar:
        names = tar.getnames()
    pairs = list(zip(names[::2], names[1::2], strict=True))
    assert len(pairs) == 6
    for image, label in pairs:
        assert image.rsplit("/")[-1].partition(".")[0] == label.rsplit("/")[-1].partition(".")[0]
        assert label.endswith(".cls")
    assert len(set(names)) == 12


def test_the_same_source_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    for place in ("one", "two"):
        convert(folder, tmp_path / place, shard_megabytes=1)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_an_interrupted_conversion_goes_on_and_leaves_nothing_half_done(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(folder, tmp_path / "whole", shard_megabytes=1)
    add, written = module._add, []

    def interrupted(tar: tarfile.TarFile, name: str, data: bytes) -> None:
        if len(written) == 9:
            raise KeyboardInterrupt
        written.append(name)
        add(tar, name, data)

    monkeypatch.setattr(module, "_add", interrupted)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        convert(folder, out, shard_megabytes=1)
    assert set(contents(out)) == {"shard-000000.tar", "unfinished.json"}
    written.clear()
    convert(folder, out, shard_megabytes=1)
    assert contents(out) == contents(tmp_path / "whole")
    assert len(written) == 6, "the first shard was there"
    written.clear()
    convert(folder, out, shard_megabytes=1)
    assert written == []


def test_a_changed_image_is_converted_again(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(folder, out, shard_megabytes=1)
    changed = bytearray((folder / "cat/1.jpg").read_bytes())
    changed[-1] ^= 1
    (folder / "cat/1.jpg").write_bytes(changed)
    convert(folder, out, shard_megabytes=1)
    assert labelled_shards(out).encoded.read(0).tobytes() == changed


def test_a_coco_folder_is_read_from_shards_in_the_order_of_its_images(tmp_path: Path) -> None:
    names = ["b.x.jpg", "deep/a.jpg", "c.jpg"]
    images = write_folder(tmp_path / "images", {name: encoded(40, 30, seed=n) for n, name in enumerate(names)})
    document = {
        "images": [
            {"id": 9 - number, "file_name": name, "width": 40, "height": 30} for number, name in enumerate(names)
        ],
        "annotations": [{"id": 1, "image_id": 9, "category_id": 1, "bbox": [1, 1, 9, 9]}],
        "categories": [{"id": 1, "name": "cell"}],
    }
    (tmp_path / "train.json").write_text(json.dumps(document))
    convert(images, tmp_path / "out", annotations=tmp_path / "train.json")
    kept = read_annotations(tmp_path / "out" / "train.json", images)
    found = sharded_files(tmp_path / "out", [kept.images.name(index) for index in range(len(kept.images))])
    assert [found.read(index).tobytes() for index in range(3)] == [record.path.read_bytes() for record in kept.images]
    assert kept.images.name(0) == "c.jpg", "ids run the other way"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"'.*a.json' is no JSON, or cut off"),
        ("[]", r"'.*a.json' has no list 'images'; a COCO detection file is needed"),
        ('{"images": []}', r"'.*a.json' has no images; nothing was converted"),
        ('{"images": [{"id": 1}]}', r"'.*a.json': image record 0 has no 'file_name'"),
        ('{"images": [{"file_name": "1.jpg"}, {"file_name": "1.jpg"}]}', r"'.*a.json' lists '1.jpg' twice"),
        ('{"images": [{"file_name": "11.jpg"}]}', r"'.*11.jpg' can't be read: No such .*; did you mean '1.jpg'\?"),
        ('{"images": [{"file_name": "x/1.jpg"}]}', r"'.*1.jpg' can't be read: No such .*; is it the right folder\?$"),
        ('{"images": [{"file_name": "2.jpg"}]}', r"'.*2.jpg' is empty \(0 bytes\)"),
    ],
)
def test_annotations_that_cannot_be_used_are_told_before_anything_is_written(
    tmp_path: Path, text: str, message: str
) -> None:
    write_folder(tmp_path / "images", {"1.jpg": encoded(), "2.jpg": b""})
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=message):
        convert(tmp_path / "images", tmp_path / "out", annotations=tmp_path / "a.json")
    assert not (tmp_path / "out").exists()


def test_the_shards_of_another_conversion_are_not_mixed_with(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(folder, out)
    for change in ("size", "image", "foreign", "no manifest"):
        if change == "image":
            write_folder(folder, {"cat/3.jpg": encoded()})
        if change == "foreign":
            (folder / "cat/3.jpg").unlink()
            (out / "x.tar").touch()
        if change == "no manifest":
            (out / "x.tar").unlink()
            (out / "shards.json").unlink()
        before = contents(out)
        with pytest.raises(ConfigError, match=r"'.*out' holds shards of another conversion; name an empty folder"):
            convert(folder, out, shard_megabytes=1 if change == "size" else 256)
        assert contents(out) == before


def test_a_place_that_cannot_be_written_is_told(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"'.*out' can't be written \(Not a directory\)"):
        convert(folder, tmp_path / "file" / "out")
    with pytest.raises(ConfigError, match="shards of 0 MB were asked for"):
        convert(folder, tmp_path / "out", shard_megabytes=0)


def test_the_command_converts(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(folder), str(tmp_path / "out"), "--shard-mb", "1"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"2 shards: {tmp_path / 'out'}\n"
    assert len(labelled_shards(tmp_path / "out")) == 6


def test_a_killed_conversion_goes_on(folder: Path, tmp_path: Path) -> None:
    """A process ended in the middle of a write leaves no shard that looks whole."""
    out, add = tmp_path / "out", module._add

    def dies(tar: tarfile.TarFile, name: str, data: bytes) -> None:
        if name.endswith("1.jpeg"):
            os._exit(9)
        add(tar, name, data)

    child = os.fork()
    if child == 0:
        module._add = dies
        convert(folder, out, shard_megabytes=1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert len(list(out.glob("*.tar"))) == 1
    convert(folder, out, shard_megabytes=1)
    convert(folder, tmp_path / "whole", shard_megabytes=1)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_real_detection_set_is_the_same_in_shards(txl_pbc: Path, tmp_path: Path) -> None:
    annotations = txl_pbc / "instances_test.json"
    convert(txl_pbc, tmp_path / "out", annotations=annotations, shard_megabytes=2)
    images = read_annotations(annotations, txl_pbc).images
    names = [images.name(index) for index in range(len(images))]
    found = sharded_files(tmp_path / "out", names)
    assert len(found.samples.archives) > 1
    assert [found.read(index).tobytes() for index in range(len(found))] == [one.path.read_bytes() for one in images]
    sizes = dict(zip(found.samples.member_names(), found.samples.column("sizes").tolist(), strict=True))
    assert [sizes[name] for name in names] == images.sizes.tolist()
