"""Image files: every kind becomes RGB, every fault has its sentence, and the resize is torchvision's."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from torchvision.models.detection.transform import GeneralizedRCNNTransform, resize_boxes

from fasttrain.errors import DataError
from fasttrain.recipes.image_sets import files
from fasttrain.recipes.image_sets.files import load_image, read_file
from fasttrain.recipes.retinanet.resize import resize, scale_boxes

EXIF_ORIENTATION = 0x0112


@pytest.fixture(params=["torchvision", "pillow"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to decode a JPEG, whichever this build has."""
    if request.param == "pillow":
        monkeypatch.setattr(files, "torchvision_jpeg_decoder", lambda: None)
    elif files.torchvision_jpeg_decoder() is None:
        pytest.skip("this torchvision was built without libjpeg")
    return str(request.param)


def picture(width: int = 60, height: int = 40) -> Image.Image:
    """A smooth picture without symmetry, so that JPEG keeps it well and any turn of it shows."""
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    return Image.fromarray((255 * np.stack([x, y, (x * (1 - y)) ** 2], axis=-1)).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **({"quality": 95, "subsampling": 0} if kind == "JPEG" else {}), **options)
    return file.getvalue()


def saved(path: Path, data: bytes, name: str = "a.jpg") -> Path:
    (path / name).write_bytes(data)
    return path / name


def difference(tensor: torch.Tensor, image: Image.Image) -> int:
    """Return the largest difference in grey levels between a loaded image and what Pillow makes of it."""
    expected = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    assert tensor.dtype == torch.uint8
    assert tensor.shape == expected.shape
    return int((tensor.int() - expected.int()).abs().max())


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpegs_of_any_colour_space_become_rgb(tmp_path: Path, decoder: str, mode: str) -> None:
    path = saved(tmp_path, encoded(picture().convert(mode)))
    assert difference(load_image(path), picture().convert(mode)) <= 8


def test_both_jpeg_decoders_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, encoded(picture()))
    first = load_image(path)
    monkeypatch.setattr(files, "torchvision_jpeg_decoder", lambda: None)
    assert (first.int() - load_image(path).int()).abs().max() <= 1


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "LA", "1"])
def test_pngs_of_any_mode_become_rgb(tmp_path: Path, mode: str) -> None:
    image = picture().convert(mode)
    assert difference(load_image(saved(tmp_path, encoded(image, "PNG"), "a.png")), image) == 0


def test_16_bits_become_their_upper_8_and_are_not_clipped(tmp_path: Path) -> None:
    grey = (np.arange(60 * 40, dtype=np.uint16) * 27).reshape(40, 60)
    loaded = load_image(saved(tmp_path, encoded(Image.fromarray(grey), "PNG"), "a.png"))
    assert loaded.shape == (3, 40, 60)
    assert (loaded.numpy() == (grey >> 8)).all()


def test_the_content_tells_the_kind_not_the_name(tmp_path: Path) -> None:
    assert difference(load_image(saved(tmp_path, encoded(picture(), "PNG"), "a.jpg")), picture()) == 0


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path: Path, decoder: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = orientation
    path = saved(tmp_path, encoded(picture(), exif=exif))
    with Image.open(path) as image:
        assert difference(load_image(path), ImageOps.exif_transpose(image)) <= 1


def test_the_annotated_size_chooses_between_rotated_and_stored(tmp_path: Path, decoder: str) -> None:
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = 6
    path = saved(tmp_path, encoded(picture(60, 40), exif=exif))
    assert load_image(path).shape == (3, 60, 40)
    assert load_image(path, (60, 40)).shape == (3, 60, 40)
    assert difference(load_image(path, (40, 60)), picture(60, 40)) <= 8
    with pytest.raises(DataError) as error:
        load_image(path, (30, 50))
    assert str(error.value) == (
        f"'{path}' is 60 x 40 pixels (40 x 60 as its EXIF rotates it), but its annotation says 50 x 30; "
        "use the file that was annotated, or correct width, height and boxes."
    )


def test_a_wrong_size_without_rotation(tmp_path: Path, decoder: str) -> None:
    path = saved(tmp_path, encoded(picture(60, 40)))
    with pytest.raises(DataError, match=r"a\.jpg' is 60 x 40 pixels, but its annotation says 40 x 60; use the file"):
        load_image(path, (60, 40))


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "is empty (0 bytes); download or copy it again."),
        (b"<html>404</html>", "is no image in a known format; replace the file, or take it out of the set."),
        (encoded(picture())[:20], "is a JPEG cut off before its end; download or copy it again."),
        (
            encoded(picture())[:20] + b"\xff\xd9",
            "is a damaged JPEG; replace the file, or take it out of the set.",
        ),
    ],
)
def test_files_that_are_no_image(tmp_path: Path, decoder: str, data: bytes, sentence: str) -> None:
    path = saved(tmp_path, data)
    with pytest.raises(DataError) as error:
        load_image(path)
    assert str(error.value) == f"'{path}' {sentence}"


@pytest.mark.parametrize("keep", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("zeros", [0, 1, 5000])
def test_a_jpeg_cut_off_is_never_padded_with_grey(tmp_path: Path, decoder: str, keep: float, zeros: int) -> None:
    """Also when zeros follow, which is what an interrupted copy leaves, and when a thumbnail has its own end marker."""
    data = encoded(picture(200, 150))
    thumbnail = b"\xff\xe1\x00\x0cExif\0\0" + encoded(picture(8, 8))[-4:]
    data = data[:2] + thumbnail + data[2:]
    path = saved(tmp_path, data[: int(len(data) * keep)] + bytes(zeros))
    with pytest.raises(DataError) as error:
        load_image(path)
    assert str(error.value) == f"'{path}' is a JPEG cut off before its end; download or copy it again."


def test_bytes_after_the_end_of_a_jpeg_do_no_harm(tmp_path: Path, decoder: str) -> None:
    path = saved(tmp_path, encoded(picture()) + b"\0\0 maker's notes")
    assert difference(load_image(path), picture()) <= 8


def test_a_png_cut_off(tmp_path: Path) -> None:
    path = saved(tmp_path, encoded(picture(200, 150), "PNG")[:-400], "a.png")
    with pytest.raises(DataError, match=r"a\.png' is damaged or cut off \(.*\); download or copy it again\.$"):
        load_image(path)


def test_floating_point_pixels_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, encoded(Image.fromarray(np.ones((4, 4), dtype=np.float32)), "TIFF"), "a.tif")
    with pytest.raises(DataError, match="it holds floating-point pixels, 8 or 16 bits are needed"):
        load_image(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no image file '.*x\.jpg'; was it moved or deleted during the run\?"):
        load_image(tmp_path / "x.jpg")
    with pytest.raises(DataError, match="can't be read: Is a directory"):
        load_image(tmp_path)


# ---- resize ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(96, 96), (40, 300), (53, 37)])
def test_a_float_resize_is_torchvisions_to_the_bit(size: tuple[int, int]) -> None:
    image = torch.rand(3, 53, 37, generator=torch.Generator().manual_seed(0))
    boxes = torch.tensor([[1.5, 2.0, 30.25, 50.0], [0.0, 0.0, 37.0, 53.0]])
    reference = GeneralizedRCNNTransform(1, 1, [0, 0, 0], [1, 1, 1], fixed_size=size[::-1])
    expected, target = reference.resize(image, {"boxes": boxes})
    assert torch.equal(resize(image, size), expected)
    assert torch.equal(scale_boxes(boxes, (53, 37), size), target["boxes"])


@pytest.mark.parametrize("size", [(96, 96), (300, 512), (33, 47)])
def test_a_uint8_resize_is_within_one_grey_level(tmp_path: Path, size: tuple[int, int]) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (120, 90, 3), dtype=np.uint8)
    image = load_image(saved(tmp_path, encoded(Image.fromarray(noise), "PNG")))
    found, exact = resize(image, size), resize(image.float(), size)
    assert found.dtype == torch.uint8
    assert found.is_contiguous()
    assert (found.float() - exact).abs().max() <= 1.0
    assert (found.float() - exact).mean().abs() < 0.1


def test_the_same_size_is_left_alone() -> None:
    image = torch.arange(3 * 4 * 5, dtype=torch.uint8).view(3, 4, 5)
    assert torch.equal(resize(image, (4, 5)), image)


sizes = st.tuples(st.integers(1, 4000), st.integers(1, 4000))


@settings(max_examples=60, deadline=None)
@given(sizes, sizes, st.lists(st.tuples(*[st.floats(0, 1, width=32)] * 4), min_size=1, max_size=5))
def test_scaled_boxes_are_torchvisions_and_come_back(
    of: tuple[int, int], to: tuple[int, int], corners: list[tuple[float, ...]]
) -> None:
    height, width = of
    boxes = torch.tensor(corners) * torch.tensor([width, height, width, height])
    scaled = scale_boxes(boxes, of, to)
    assert torch.equal(scaled, resize_boxes(boxes, list(of), list(to)))
    assert torch.allclose(scale_boxes(scaled, to, of), boxes, rtol=1e-6, atol=1e-3)
    assert scaled[:, 0::2].max() <= to[1] * (1 + 1e-6)
    assert scaled[:, 1::2].max() <= to[0] * (1 + 1e-6)


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    content = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)
    for length in (0, 1, 100_000):
        (tmp_path / "file").write_bytes(content[:length].tobytes())
        assert np.array_equal(read_file(tmp_path / "file"), content[:length])
    with pytest.raises(DataError, match=r"^there is no image file '.*gone'; was it moved"):
        read_file(tmp_path / "gone")
    with pytest.raises(DataError, match=r"' can't be read: Is a directory\.$"):
        read_file(tmp_path)
