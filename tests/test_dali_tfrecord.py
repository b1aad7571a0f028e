"""TFRecord files: images where other readers find them, checksums judged, and a sentence for each fault."""

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from encoded_images import (
    bytes_feature,
    encoded,
    example,
    float_feature,
    int64_feature,
    record,
    write_folder,
    write_tar,
)

from fasttrain.callbacks.dali_loader.containers import labelled_images
from fasttrain.callbacks.dali_loader.tfrecord import tfrecord_images
from fasttrain.errors import DataError

pytest.importorskip("google_crc32c")

IMAGES = [encoded(20 + number, 30, seed=number) for number in range(4)]


def imagenet(image: bytes, label: int, packed: bool = True) -> dict[str, bytes]:
    """Return the features that TensorFlow's ImageNet tool writes, or some of them."""
    return {
        "image/height": int64_feature(30),
        "image/object/bbox/xmin": float_feature(0.25, 0.5),
        "image/encoded": bytes_feature(image),
        "image/filename": bytes_feature(b"n01440764_10026.JPEG"),
        "image/class/label": int64_feature(label, packed=packed),
        "image/object/bbox/label": int64_feature(),
    }


def write(path: Path, *examples: Mapping[str, bytes]) -> Path:
    path.write_bytes(b"".join(record(example(features)) for features in examples))
    return path


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return [
        write(tmp_path / "train-00000-of-00002", *(imagenet(IMAGES[n], n + 1, packed=n > 0) for n in range(3))),
        write(tmp_path / "train-00001-of-00002", imagenet(IMAGES[3], 1)),
    ]


def test_images_are_read_where_they_lie_with_labels_and_sizes(files: list[Path]) -> None:
    found = tfrecord_images(files, first_label=1)
    assert [found.encoded.read(index).tobytes() for index in range(len(found))] == IMAGES
    assert found.labels.tolist() == [0, 1, 2, 0]
    assert found.class_names == ("0", "1", "2")
    assert found.image_sizes(np.arange(4)).tolist() == [[20, 30], [21, 30], [22, 30], [23, 30]]
    assert found.encoded.name(3) == f"record 0 in {files[1]}"
    assert tfrecord_images(files, first_label=1, class_names=["cat", "dog", "owl", "emu"]).num_classes == 4


def test_dalis_own_reader_finds_the_same(files: list[Path]) -> None:
    """Ours and the writer of these tests agree with somebody else about the format."""
    pytest.importorskip("nvidia.dali")
    from nvidia.dali import fn, pipeline_def, tfrecord

    lengths = [len(record(example(imagenet(IMAGES[n], n + 1, packed=n > 0)))) for n in range(3)]
    index = files[0].with_name("index")
    index.write_text("".join(f"{sum(lengths[:n])} {lengths[n]}\n" for n in range(3)))
    features = {
        "image/encoded": tfrecord.FixedLenFeature((), tfrecord.string, ""),
        "image/class/label": tfrecord.FixedLenFeature([1], tfrecord.int64, -1),
    }

    @pipeline_def(batch_size=3, num_threads=1, device_id=None, prefetch_queue_depth=1)
    def read() -> tuple[object, ...]:
        found = fn.readers.tfrecord(path=str(files[0]), index_path=str(index), features=features)
        return found["image/encoded"], found["image/class/label"]

    images, labels = read().run()
    ours = tfrecord_images(files[:1])
    assert [np.asarray(images.at(n)).tobytes() for n in range(3)] == [ours.encoded.read(n).tobytes() for n in range(3)]
    assert np.asarray(labels.as_tensor()).ravel().tolist() == ours.labels.tolist()


def test_tensorboards_reader_takes_the_same_checksums(files: list[Path]) -> None:
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

    reader = PyRecordReader_New(str(files[0]))
    for number in range(3):
        reader.GetNext()
        assert reader.record() == example(imagenet(IMAGES[number], number + 1, packed=number > 0))


def test_other_features_can_be_named(tmp_path: Path) -> None:
    file = write(tmp_path / "a.tfrecord", {"jpeg": bytes_feature(IMAGES[0]), "label": int64_feature(5)})
    assert tfrecord_images([file], image="jpeg", label="label").labels.tolist() == [5]
    with pytest.raises(DataError, match=r"'.*a.tfrecord', record 0 has no feature 'jpg'; did you mean 'jpeg'\?"):
        tfrecord_images([file], image="jpg", label="label")
    with pytest.raises(DataError, match=r"record 0 has no feature 'image/class/label'; known: jpeg, label"):
        tfrecord_images([file], image="jpeg")


def test_every_cut_and_every_changed_byte_is_noticed(files: list[Path]) -> None:
    data = files[1].read_bytes()
    for cut in (1, 11, 12, 100, len(data) - 1):
        files[1].write_bytes(data[:cut])
        with pytest.raises(DataError, match=rf"'.*00001-of-00002' is cut off in record 0, .* byte 0 of {cut:,}; copy"):
            tfrecord_images(files)
    for at, message in ((0, "the length of record 0"), (9, "the length of record 0"), (200, "record 0 has another"),
                        (len(data) - 1, "record 0 has another")):  # fmt: skip
        changed = bytearray(data)
        changed[at] ^= 1
        files[1].write_bytes(changed)
        with pytest.raises(DataError, match=rf"'.*00001-of-00002' is damaged.*{message}"):
            tfrecord_images(files)


def test_no_file_and_an_empty_one_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no TFRecord files were given"):
        tfrecord_images([])
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match=r"the archive '.*empty' is empty \(0 bytes\)"):
        tfrecord_images([tmp_path / "empty"])
    (tmp_path / "other").write_bytes(os.urandom(100))
    with pytest.raises(DataError, match=r"'.*other' is damaged, or no TFRecord file: the length of record 0"):
        tfrecord_images([tmp_path / "other"])


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"image/encoded": bytes_feature()}, "the feature 'image/encoded' is 0 byte strings; one encoded image"),
        ({"image/encoded": bytes_feature(b"")}, "the feature 'image/encoded' is empty"),
        ({"image/encoded": bytes_feature(b"a", b"b")}, "the feature 'image/encoded' is 2 byte strings"),
        ({"image/encoded": int64_feature(1)}, "the feature 'image/encoded' is 0 byte strings"),
        ({"image/class/label": int64_feature()}, "the feature 'image/class/label' is 0 numbers; one label"),
        ({"image/class/label": int64_feature(1, 2)}, "the feature 'image/class/label' is 2 numbers"),
        ({"image/class/label": int64_feature(-1)}, "the feature 'image/class/label' is -1; one label"),
        ({"image/class/label": bytes_feature(b"cat")}, "the feature 'image/class/label' is 0 numbers"),
    ],
)
def test_a_record_with_something_else_in_it_is_named(tmp_path: Path, features: dict[str, bytes], message: str) -> None:
    file = write(tmp_path / "a", imagenet(IMAGES[0], 1), imagenet(IMAGES[0], 1) | features)
    with pytest.raises(DataError, match=rf"'.*a', record 1: {message}"):
        tfrecord_images([file])


def test_a_record_that_is_no_example_is_named(tmp_path: Path) -> None:
    for content in (b"\x0a\xff\x01", b"\x0b\x00", b"\xff" * 12):
        (tmp_path / "a").write_bytes(record(content))
        with pytest.raises(DataError, match=r"'.*a', record 0 is no tf.train.Example"):
            tfrecord_images([tmp_path / "a"])


def test_labels_that_do_not_fit_are_told(files: list[Path]) -> None:
    with pytest.raises(DataError, match=r"'record 0 in .*' has the label 1, but the first label is said to be 2;"):
        tfrecord_images(files, first_label=2)
    with pytest.raises(DataError, match=r"has the label 3, which is class 3 counted from 0, but 3 classes are named"):
        tfrecord_images(files, class_names=["cat", "dog", "owl"])


def test_a_folder_is_taken_for_what_lies_in_it(files: list[Path]) -> None:
    folder = files[0].parent
    assert labelled_images(folder, first_label=1).labels.tolist() == [0, 1, 2, 0]
    write_tar(folder / "a.tar", [("1.jpg", IMAGES[0]), ("1.cls", b"7")])
    with pytest.raises(DataError, match=r"'.*' has tar shards and TFRecord files; name a folder with one of them"):
        labelled_images(folder)
    for file in files:
        file.unlink()
    assert labelled_images(folder).labels.tolist() == [7]
    (folder / "a.tar").unlink()
    with pytest.raises(DataError, match=r"'.*' has no subfolders; a folder for each class is needed"):
        labelled_images(folder)
    write_folder(folder / "cat", {"1.jpg": IMAGES[0]})
    assert labelled_images(folder).class_names == ("cat",)
    (folder / "b.tfrecord").write_bytes(record(example(imagenet(IMAGES[0], 3))))
    assert labelled_images(folder).labels.tolist() == [3]
