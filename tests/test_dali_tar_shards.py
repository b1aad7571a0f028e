"""Tar shards: members by byte range, read by threads and after a fork, and a sentence for each fault."""

import json
import os
import pickle
import tarfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from encoded_images import encoded, write_folder, write_tar

from fasttrain.callbacks.dali_loader import archived, tar_shards
from fasttrain.callbacks.dali_loader.labelled import class_folder
from fasttrain.callbacks.dali_loader.tar_shards import labelled_shards, sharded_files
from fasttrain.errors import DataError

IMAGES = [encoded(20 + number, 30, seed=number) for number in range(6)]


def members(numbers: Iterable[int]) -> list[tuple[str, bytes]]:
    """Return webdataset's layout: an image, its label, and what is nobody's business here."""
    return [
        member
        for number in numbers
        for member in (
            (f"x/{number:04d}.jpg", IMAGES[number]),
            (f"x/{number:04d}.txt", b"a caption"),
            (f"x/{number:04d}.cls", b"%d\n" % (number % 3)),
        )
    ]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    write_tar(tmp_path / "b.tar", members(range(4, 6)))
    write_tar(tmp_path / "a.tar", members(range(4)))
    return tmp_path


def test_samples_come_in_the_order_of_shards_and_members_with_labels_and_sizes(shards: Path) -> None:
    found = labelled_shards(shards)
    assert [found.encoded.read(index).tobytes() for index in range(len(found))] == IMAGES
    assert found.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert found.class_names == ("0", "1", "2")
    assert found.num_classes == 3
    assert found.image_sizes(np.array([5, 0])).tolist() == [[25, 30], [20, 30]]
    assert found.encoded.name(4) == f"x/0004.jpg in {shards / 'b.tar'}"


def test_a_label_may_be_in_a_json_member_and_other_json_is_none(tmp_path: Path) -> None:
    write_tar(
        tmp_path / "a.tar",
        [
            ("1.json", json.dumps({"label": 4, "caption": "a cat"}).encode()),
            ("1.png", encoded(kind="PNG")),
            ("2.jpeg", encoded()),
            ("2.json", b'{"cls": 7}'),
            ("3.JPG", encoded()),
            ("3.json", b'{"label": 1}'),
            ("3.cls", b"2"),
        ],
    )
    assert labelled_shards(tmp_path).labels.tolist() == [4, 7, 2]
    boxes = write_tar(tmp_path / "boxes.tar", [("1.jpg", encoded()), ("1.json", b'{"boxes": []}')])
    assert len(sharded_files([boxes], ["1.jpg"])) == 1


def test_class_names_come_from_the_manifest(shards: Path) -> None:
    (shards / "shards.json").write_text(json.dumps({"classes": ["cat", "dog", "owl", "emu"]}))
    assert labelled_shards(shards).class_names == ("cat", "dog", "owl", "emu")
    (shards / "shards.json").write_text(json.dumps({"classes": ["cat", "dog"]}))
    with pytest.raises(DataError, match=r"'x/0002.jpg in .*' has the label 2, but '.*shards.json' names 2 classes\."):
        labelled_shards(shards)


def test_images_are_found_by_name_in_the_order_of_an_annotation_file(shards: Path) -> None:
    names = [f"x/{number:04d}.jpg" for number in (5, 0, 3)]
    found = sharded_files(shards, names)
    assert len(found) == 3
    assert [found.read(index).tobytes() for index in range(3)] == [IMAGES[5], IMAGES[0], IMAGES[3]]
    assert found.name(0) == f"x/0005.jpg in {shards / 'b.tar'}"
    with pytest.raises(DataError, match=r"no shard in '.*' has the annotated image 'y.jpg' \(and 1 others\); convert"):
        sharded_files(shards, ["x/0001.jpg", "y.jpg", "z.jpg"])
    write_tar(shards / "c.tar", members([3]))
    with pytest.raises(DataError, match=r"'x/0003.jpg' is in two shards, '.* in .*a.tar' and '.*c.tar'; keep one"):
        sharded_files(shards, names)


def test_threads_read_the_same_bytes_through_few_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archived._OpenFiles.__init__, "__defaults__", (2,))
    for number in range(6):
        write_tar(tmp_path / f"{number}.tar", members([number]))
    before = len(os.listdir("/proc/self/fd"))
    samples = labelled_shards(tmp_path).encoded
    order = np.random.default_rng(0).integers(0, 6, 600).tolist()
    with ThreadPoolExecutor(8) as threads:
        read = list(threads.map(lambda index: samples.read(index).tobytes(), order))
    assert read == [IMAGES[index] for index in order]
    assert len(os.listdir("/proc/self/fd")) <= before + 2 + 8
    assert isinstance(samples, archived.ArchivedSamples)
    samples.read(0)
    samples.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert pickle.loads(pickle.dumps(samples)).read(3).tobytes() == IMAGES[3]


def test_a_forked_process_reads_the_same_bytes(shards: Path) -> None:
    samples = labelled_shards(shards).encoded
    assert samples.read(0).tobytes() == IMAGES[0]
    child = os.fork()
    if child == 0:
        same = [samples.read(index).tobytes() for index in (5, 0, 3)] == [IMAGES[5], IMAGES[0], IMAGES[3]]
        os._exit(0 if same else 1)
    assert [samples.read(index).tobytes() for index in range(6)] == IMAGES
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_shard_is_indexed_once_and_again_when_it_changes(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    indexed: list[str] = []
    index = tar_shards._index
    monkeypatch.setattr(tar_shards, "_index", lambda archive: (indexed.append(archive.name), index(archive))[1])
    progress: list[tuple[int, int]] = []
    for _ in range(2):
        found = labelled_shards(shards, on_progress=lambda done, total: progress.append((done, total)))
        assert sorted(indexed) == ["a.tar", "b.tar"]
        assert found.encoded.read(4).tobytes() == IMAGES[4]
    assert progress == [(1, 2), (2, 2)] * 2
    write_tar(shards / "b.tar", members([1, 2, 3]))
    assert [labelled_shards(shards).encoded.read(at).tobytes() for at in (4, 5, 6)] == IMAGES[1:4]
    assert len(indexed) == 3


def test_an_index_that_was_damaged_is_made_again(shards: Path) -> None:
    labelled_shards(shards)
    for kept in (Path(os.environ["FASTTRAIN_CACHE"]) / "archives").iterdir():
        kept.write_bytes(kept.read_bytes()[:100])
    assert labelled_shards(shards).labels.tolist() == [0, 1, 2, 0, 1, 2]


def test_an_index_is_made_where_there_is_no_place_to_keep_it(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shards / "file").write_text("no folder")
    monkeypatch.setenv("FASTTRAIN_CACHE", str(shards / "file"))
    assert len(labelled_shards(shards)) == 6


def test_a_shard_cut_off_anywhere_is_told_from_a_whole_one(tmp_path: Path) -> None:
    """Python's tarfile takes a file that ends between two members for a whole one."""
    whole = write_tar(tmp_path / "whole.tar", members(range(3))).read_bytes()
    with tarfile.open(tmp_path / "whole.tar") as tar:
        borders = [member.offset for member in tar]
    for cut in {1, 511, 512, 700, *borders[1:], borders[3] + 512, len(whole) - 10240 - 100}:
        (tmp_path / "cut.tar").write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"^the archive '.*cut.tar' is cut off"):
            labelled_shards([tmp_path / "cut.tar"])


def test_a_damaged_header_is_no_end(tmp_path: Path) -> None:
    data = bytearray(write_tar(tmp_path / "a.tar", members(range(3))).read_bytes())
    with tarfile.open(tmp_path / "a.tar") as tar:
        at = tar.getmembers()[3].offset
    data[at : at + 8] = b"\xffdamaged"
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(DataError, match=rf"^the archive '.*a.tar' is damaged at byte {at:,}; copy or write it again"):
        labelled_shards(tmp_path)


def test_a_shard_cut_off_after_it_was_indexed_names_the_sample(shards: Path) -> None:
    samples = labelled_shards(shards).encoded
    with open(shards / "b.tar", "r+b") as file:
        file.truncate(600)
    with pytest.raises(DataError, match=r"'x/0004.jpg in .*b.tar' ends after 88 of [\d,]+ bytes: the archive was cut"):
        samples.read(4)
    (shards / "a.tar").unlink()
    with pytest.raises(DataError, match=r"'x/0000.jpg in .*a.tar' can't be read: No such file"):
        samples.read(0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([("1.jpg", IMAGES[0]), ("1.cls", b"0"), ("1.jpg", IMAGES[1])], r"'.*a.tar' has the member '1.jpg' twice"),
        ([("1.jpg", IMAGES[0])], r"'1.jpg in .*a.tar' has no label: beside it a member with the same stem is needed"),
        (
            [("1.jpg", IMAGES[0]), ("2.jpg", IMAGES[1])],
            r"'1.jpg in .*a.tar' has no label, nor have 1 others",
        ),
        ([("1.jpg", IMAGES[0]), ("2.cls", b"0")], r"'.*a.tar' has the label '2.cls' and no image with its stem"),
        ([("1.jpg", b""), ("1.cls", b"0")], r"'.*a.tar', '1.jpg' is empty \(0 bytes\)"),
        ([("1.jpg", IMAGES[0]), ("1.cls", b"")], r"'.*a.tar', '1.cls' is empty \(0 bytes\)"),
        ([("1.jpg", IMAGES[0]), ("1.cls", b"cat")], r"'1.cls' holds b'cat'; a class index is needed"),
        ([("1.jpg", IMAGES[0]), ("1.cls", b"-1")], r"'1.cls' holds -1; a class index is needed"),
        ([("1.jpg", IMAGES[0]), ("1.json", b'{"label": 1.5}')], r"'1.json' holds 1.5; a class index is needed"),
        ([("1.jpg", IMAGES[0]), ("1.json", b"{")], r"'1.json' holds b'{'; a class index is needed"),
        ([("1.l.jpg", IMAGES[0]), ("1.r.jpg", IMAGES[0]), ("1.cls", b"1")], r"two images for one label, '1.l.jpg'"),
        ([("1.txt", b"text")], r"the archive '.*a.tar' holds no images \(.jpg"),
        ([], r"the archive '.*a.tar' holds no images"),
    ],
)
def test_each_fault_names_the_archive_and_the_member(
    tmp_path: Path, content: list[tuple[str, bytes]], message: str
) -> None:
    write_tar(tmp_path / "a.tar", content)
    with pytest.raises(DataError, match=message):
        labelled_shards(tmp_path)


def test_what_is_no_shard_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'.*' has no tar files; `fasttrain convert` writes tar shards"):
        labelled_shards(tmp_path)
    with pytest.raises(DataError, match=r"'.*none' is no folder; `fasttrain convert`"):
        labelled_shards(tmp_path / "none")
    with pytest.raises(DataError, match=r"the archive '.*gone.tar' can't be read: No such file"):
        labelled_shards([tmp_path / "gone.tar"])
    (tmp_path / "a.tar").touch()
    with pytest.raises(DataError, match=r"the archive '.*a.tar' is empty \(0 bytes\)"):
        labelled_shards(tmp_path)
    (tmp_path / "a.tar").write_bytes(b"no tar file at all" * 100)
    with pytest.raises(DataError, match=r"the archive '.*a.tar' is cut off, damaged or no tar file"):
        labelled_shards(tmp_path)
    with tarfile.open(tmp_path / "a.tar", "w:gz"):
        pass
    with pytest.raises(DataError, match=r"the archive '.*a.tar' is compressed, and a sample can't be found in that"):
        labelled_shards(tmp_path)


def test_a_folder_of_classes_is_numbered_as_torchvisions_image_folder(tmp_path: Path) -> None:
    from torchvision.datasets import ImageFolder

    names = ["b/2.jpg", "b/10.png", "a/x.JPG", "a/deep/er/1.jpg", "a/deep/2.jpg", "c/y.jpeg"]
    write_folder(tmp_path, {name: encoded(20 + number, 30, seed=number) for number, name in enumerate(names)})
    write_folder(tmp_path, {"a/notes.txt": b"", "list.txt": b""})
    ours, theirs = class_folder(tmp_path), ImageFolder(str(tmp_path))
    assert [ours.encoded.name(index) for index in range(len(ours))] == [path for path, _ in theirs.samples]
    assert ours.labels.tolist() == theirs.targets
    assert list(ours.class_names) == theirs.classes
    sizes = [theirs[index][0].size for index in range(len(theirs))]
    assert ours.image_sizes(np.arange(6)).tolist() == [list(size) for size in sizes]


def test_a_folder_without_classes_or_images_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'.*' has no subfolders; a folder for each class is needed"):
        class_folder(tmp_path)
    (tmp_path / "cat").mkdir()
    with pytest.raises(DataError, match=r"the class folder '.*cat' has no images \(.jpg.*\); fill or remove it"):
        class_folder(tmp_path)
    with pytest.raises(DataError, match=r"the folder '.*dog' can't be read: No such file"):
        class_folder(tmp_path / "dog")
    write_folder(tmp_path, {"cat/1.jpg": b"broken"})
    with pytest.raises(DataError, match=r"'.*cat/1.jpg' has no header of an image"):
        class_folder(tmp_path).image_sizes(np.array([0]))
