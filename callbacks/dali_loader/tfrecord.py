"""TFRecord files without TensorFlow: where each record's image lies in the file, and its label.

A file is a row of records: length (8 bytes, little endian), masked CRC-32C of the length, data, masked CRC-32C of the
data (https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details). The data is a
`tf.train.Example`, of whose protobuf encoding (https://protobuf.dev/programming-guides/encoding) only what leads to two
features is read. The file is checked once, when it is indexed.
"""

import mmap
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from fasttrain.callbacks.dali_loader.archived import ByteRanges, Row, archived_samples
from fasttrain.callbacks.dali_loader.image_size import image_size
from fasttrain.callbacks.dali_loader.labelled import LabelledImages
from fasttrain.errors import DataError, MissingDependencyError, nearest

LENGTH_DELIMITED = 2
Span = tuple[int, int]
Buffer = mmap.mmap


def tfrecord_images(
    files: Sequence[Path],
    *,
    image: str = "image/encoded",
    label: str = "image/class/label",
    first_label: int = 0,
    class_names: Sequence[str] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> LabelledImages:
    """Return the images of TFRecord files with their labels, in the order of the files and of the records in each.

    Args:
        files: of `tf.train.Example`s.
        image: feature with the encoded image, bytes.
        label: feature with the label, int64.
        first_label: label of the first class; ImageNet's records as TensorFlow's tools write them begin with 1.
        class_names: by class index; default the numbers.
        on_progress: called with the files indexed and their number.

    Raises:
        DataError: a file is empty or cut off, a checksum is wrong, or a record lacks one of the features or has
            something else in it; the message names the file and the record.
        MissingDependencyError: google-crc32c isn't installed.
    """
    if not files:
        raise DataError("no TFRecord files were given.")
    samples = archived_samples(
        files, f"tfrecord {image} {label}", partial(_index, image=image, label=label), on_progress
    )
    labels = samples.column("labels") - first_label
    if labels.min() < 0:
        raise DataError(
            f"'{samples.name(int(labels.argmin()))}' has the label {labels.min() + first_label}, but the first label "
            f"is said to be {first_label}; lower it."
        )
    count = int(labels.max()) + 1
    names = tuple(class_names) if class_names is not None else tuple(map(str, range(count)))
    if count > len(names):
        raise DataError(
            f"'{samples.name(int(labels.argmax()))}' has the label {count - 1 + first_label}, which is class "
            f"{count - 1} counted from {first_label}, but {len(names)} classes are named; is the first label right?"
        )
    return LabelledImages(samples, labels, names, samples.image_sizes())


def _index(file: Path, image: str, label: str) -> ByteRanges:
    rows: list[Row] = []
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for number, span in enumerate(_records(data, file)):
            name = f"record {number}"
            try:
                features = dict(_features(data, span))
            except (ValueError, IndexError):
                raise DataError(f"'{file}', {name} is no tf.train.Example; name other files.") from None
            offset, end = _image(data, features, image, f"'{file}', {name}")
            length = end - offset
            size = image_size(lambda count, offset=offset, end=end: data[offset : min(end, offset + count)])  # type: ignore[misc]
            rows.append((name, offset, length, size, _label(data, features, label, f"'{file}', {name}")))
    return ByteRanges.of_rows(rows)


def _records(data: Buffer, file: Path) -> Iterator[Span]:
    """Yield where each record's data begins and ends, its checksums found right."""
    checksum = _masked_crc()
    at, number = 0, 0
    while at < len(data):
        head = data[at : at + 12]
        if len(head) == 12 and checksum(head[:8]) != head[8:]:
            what = "is damaged, or no TFRecord file" if not number else "is damaged"
            raise DataError(f"'{file}' {what}: the length of record {number} has another checksum than stored with it.")
        begin = at + 12
        end = begin + int.from_bytes(head[:8], "little")
        if len(head) < 12 or end + 4 > len(data):
            raise DataError(
                f"'{file}' is cut off in record {number}, which begins at byte {at:,} of {len(data):,}; copy or write "
                "it again."
            )
        if checksum(data[begin:end]) != data[end : end + 4]:
            raise DataError(
                f"'{file}' is damaged: record {number} has another checksum than stored with it; copy it again."
            )
        yield begin, end
        at, number = end + 4, number + 1


def _masked_crc() -> Callable[[bytes], bytes]:
    try:
        from google_crc32c import value
    except ImportError as error:
        raise MissingDependencyError(
            "TFRecord files need google-crc32c, for the checksums in them: pip install google-crc32c"
        ) from error

    def masked(data: bytes) -> bytes:
        crc = value(data)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    return masked


# ---- protobuf: a message is a row of fields, each a tag (number and kind) and a value -----------------------------


def _fields(data: Buffer, span: Span) -> Iterator[tuple[int, int | Span]]:
    """Yield field number and value of a message: an int, or where a length-delimited one lies."""
    at, end = span
    while at < end:
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == LENGTH_DELIMITED:
            length, at = _varint(data, at)
            if at + length > end:
                raise ValueError("a field is longer than its message")
            yield tag >> 3, (at, at + length)
            at += length
        elif kind == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
        elif kind in (1, 5):  # fixed 64 and 32 bits: floats, which nothing here asks for
            at += 8 if kind == 1 else 4
        else:
            raise ValueError("no such kind of field")
    if at != end:
        raise ValueError("a field ends outside its message")


def _varint(data: Buffer, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")


def _only(data: Buffer, span: Span, number: int) -> Iterator[Span]:
    """Yield the length-delimited fields of one number."""
    for found, value in _fields(data, span):
        if found == number and isinstance(value, tuple):
            yield value


def _features(data: Buffer, example: Span) -> Iterator[tuple[str, Span]]:
    """Yield each feature's name and where its `Feature` message lies: Example.features.feature is a map."""
    for features in _only(data, example, 1):
        for entry in _only(data, features, 1):
            parts = dict(_fields(data, entry))
            key, value = parts.get(1), parts.get(2)
            if isinstance(key, tuple) and isinstance(value, tuple):
                yield data[key[0] : key[1]].decode(), value


def _chosen(features: dict[str, Span], wanted: str, record: str) -> Span:
    if wanted not in features:
        raise DataError(f"{record} has no feature '{wanted}'; {nearest(wanted, features)}")
    return features[wanted]


def _image(data: Buffer, features: dict[str, Span], wanted: str, record: str) -> Span:
    """Return where the one value of a bytes feature lies."""
    feature = _chosen(features, wanted, record)
    values = [value for bytes_list in _only(data, feature, 1) for value in _only(data, bytes_list, 1)]
    if len(values) != 1 or values[0][0] == values[0][1]:
        found = "empty" if len(values) == 1 else f"{len(values)} byte strings"
        raise DataError(f"{record}: the feature '{wanted}' is {found}; one encoded image is needed.")
    return values[0]


def _label(data: Buffer, features: dict[str, Span], wanted: str, record: str) -> int:
    """Return the one value of an int64 feature, which may be packed or not."""
    feature = _chosen(features, wanted, record)
    values: list[int] = []
    for int64_list in _only(data, feature, 3):
        for number, value in _fields(data, int64_list):
            if number == 1 and isinstance(value, tuple):
                at, end = value
                while at < end:
                    packed, at = _varint(data, at)
                    values.append(packed)
            elif number == 1 and isinstance(value, int):
                values.append(value)
    if len(values) != 1 or values[0] >= 2**31:
        found = f"{len(values)} numbers" if len(values) != 1 else str(values[0] - 2**64 * (values[0] >= 2**63))
        raise DataError(f"{record}: the feature '{wanted}' is {found}; one label is needed, a whole number from 0 on.")
    return values[0]
