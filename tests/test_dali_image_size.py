"""The size of an encoded image: what DALI decodes, told by the first bytes."""

import io
from pathlib import Path

import numpy as np
import pytest
from encoded_images import encoded
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fasttrain.callbacks.dali_loader.image_size import UNKNOWN, ImageSizes, image_size
from fasttrain.errors import DataError


def size_of(data: bytes) -> tuple[int, int]:
    return image_size(lambda count: data[:count])


def with_orientation(value: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = value
    exif[0x010E] = "a description that lies before it"
    return encoded(40, 24, exif=exif.tobytes())


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from(["baseline", "progressive", "grey"]))
def test_a_jpegs_size_is_read_from_its_frame_header(width: int, height: int, kind: str) -> None:
    file = io.BytesIO()
    picture = Image.new("L" if kind == "grey" else "RGB", (width, height))
    picture.save(file, "JPEG", progressive=kind == "progressive")
    assert size_of(file.getvalue()) == (width, height)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "WEBP", "TIFF", "PPM"])
def test_other_kinds_are_pillows(kind: str) -> None:
    assert size_of(encoded(37, 21, kind)) == (37, 21)


def test_a_header_beyond_the_first_bytes_is_found() -> None:
    profile = b"\xff\xe2\xff\xfd" + bytes(65531)
    data = encoded(37, 21)
    for segments in (1, 3, 9):  # within the first, the second and beyond both heads that are read
        assert size_of(data[:2] + segments * profile + data[2:]) == (37, 21)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_exif_orientation_that_turns_exchanges_the_sides_as_dalis_decoder_does(orientation: int) -> None:
    pytest.importorskip("nvidia.dali")
    from nvidia.dali import fn, pipeline_def

    data = with_orientation(orientation)

    @pipeline_def(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
    def decoded() -> object:
        return fn.decoders.image(fn.external_source(source=lambda: [np.frombuffer(data, np.uint8)]))

    (output,) = decoded().run()
    assert size_of(data) == output.at(0).shape[1::-1] == ((24, 40) if orientation >= 5 else (40, 24))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xd8",
        b"\xff\xd8\xff\xd9",
        b"not an image",
        b"\xff\xd8\xff\xe0\x00",
        encoded()[:150],
        encoded(kind="PNG")[:12],
        b"\xff\xd8\xff\xc0\x00\x0b\x08\x00\x00\x00\x20\x01\x01\x11\x00",  # a height of 0
    ],
    ids=repr,
)
def test_what_is_no_image_or_cut_off_before_its_size_is_unknown(data: bytes) -> None:
    assert size_of(data) == UNKNOWN


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_after_a_jpegs_begin_give_a_size_or_none_and_never_an_exception(data: bytes) -> None:
    width, height = size_of(b"\xff\xd8" + data)
    assert (width > 0) == (height > 0)


def test_a_segment_of_no_length_does_not_go_on_forever() -> None:
    assert size_of(b"\xff\xd8" + b"\xff\xe0\x00\x00" * 3) == UNKNOWN


def test_sizes_are_read_once_and_an_unreadable_one_names_its_image(tmp_path: Path) -> None:
    images = [encoded(30, 20), encoded(20, 30), b"broken"]
    asked: list[int] = []

    def head(index: int, count: int) -> bytes:
        asked.append(index)
        return images[index][:count]

    sizes = ImageSizes(head, np.zeros((3, 2), dtype=np.int32), lambda index: f"picture {index}")
    for _ in range(2):
        assert sizes(np.array([1, 0, 1])).tolist() == [[20, 30], [30, 20], [20, 30]]
    assert asked.count(0) == 1
    with pytest.raises(DataError, match=r"^'picture 2' has no header of an image that could be read; replace"):
        sizes(np.array([0, 2]))
