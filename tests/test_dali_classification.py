"""Classification batches of a CPU pipeline against torch's: pixels, labels, mirrors and mixtures."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dali_graphs import one_batch
from encoded_images import encoded, write_folder
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from fasttrain.callbacks.dali_loader.classification import IMAGENET_MEAN, IMAGENET_STD, ClassificationGraph
from fasttrain.callbacks.dali_loader.labelled import LabelledImages, class_folder
from fasttrain.callbacks.dali_loader.reference import repeated_colours
from fasttrain.errors import ConfigError, DataError
from fasttrain.order import SampleKey
from fasttrain.recipes.image_sets.files import load_image
from fasttrain.recipes.resnet50.dataset import Augmentation, ClassificationDataset

pytest.importorskip("nvidia.dali")

KEYS = [SampleKey(2, index) for index in (3, 0, 5, 1, 4, 2, 3)]
# Grey levels of 255: DALI's resize rounds once, at its end, torchvision's of uint8 images after each direction.
TO_EXACT, TO_TORCHVISION = 0.51, 1.01
# Where the filter of an output pixel on the window's border reaches out of the window, an eighth of its weight lies
# outside: DALI gives that to the outermost pixels, torchvision to all. 8 levels were seen, in pictures full of edges.
ON_THE_BORDER = 12.0


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> LabelledImages:
    """Six images of different shapes: JPEGs, one grey, one turned by its EXIF, and a PNG."""
    exif = Image.Exif()
    exif[0x0112] = 6
    files = {
        "a/0.jpg": encoded(500, 375, seed=0),
        "a/1.jpg": encoded(120, 333, seed=1),
        "a/2.png": encoded(301, 200, kind="PNG", seed=2),
        "b/3.jpg": encoded(640, 130, seed=3, exif=exif.tobytes()),
        "b/4.jpg": encoded(90, 91, seed=4, subsampling=0),
        "c/5.jpg": encoded(256, 341, seed=5, progressive=True),
    }
    return class_folder(write_folder(tmp_path_factory.mktemp("classes"), files))


def pixels(samples: LabelledImages, index: int) -> Tensor:
    return load_image(samples.encoded.name(index))


def assert_same_pixels(found: Tensor, transform: Callable[[Tensor], Tensor], image: Tensor, border: int = 0) -> None:
    """Compare with torchvision's transform of a uint8 image, and of the same pixels as real numbers."""
    to_torchvision, to_exact = found - transform(image), found - transform(image.float())
    if border:
        assert to_exact.abs().max() <= ON_THE_BORDER
        inside = (..., slice(border, -border), slice(border, -border))
        to_torchvision, to_exact = to_torchvision[inside], to_exact[inside]
    assert to_exact.abs().max() <= TO_EXACT
    assert to_exact.mean().abs() < 0.02
    assert to_torchvision.abs().max() <= TO_TORCHVISION


def grey_levels(images: NDArray[Any]) -> Tensor:
    """Undo a channels-last batch's normalization: (B, 3, S, S) in 0..255."""
    unit = torch.from_numpy(images).float() * torch.tensor(IMAGENET_STD) + torch.tensor(IMAGENET_MEAN)
    return 255 * unit.permute(0, 3, 1, 2)


@pytest.mark.parametrize("decode_window", [True, False])
def test_training_pixels_are_those_of_torchvision_for_the_same_windows(
    samples: LabelledImages, decode_window: bool
) -> None:
    graph = ClassificationGraph(samples=samples, augment=True, seed=1, image_size=96, decode_window=decode_window)
    batch = one_batch(graph, samples.encoded, KEYS)
    drawn = graph.parameters(KEYS)
    assert batch["images"].shape == (7, 96, 96, 3)
    assert batch["images"].dtype == np.float32
    mirrored = np.asarray(drawn["extent"])[:, 1] < 0
    assert 0 < mirrored.sum() < 7
    for row, key in enumerate(KEYS):
        (top, left), (height, width) = drawn["crop_start"][row].tolist(), drawn["crop_shape"][row].tolist()
        found = grey_levels(batch["images"])[row]
        if mirrored[row]:
            found = found.flip(-1)
        crop = partial(functional.resized_crop, top=top, left=left, height=height, width=width, size=[96, 96])
        assert_same_pixels(found, crop, pixels(samples, key.index), border=1)


def test_a_torch_loader_shows_the_same_crops(samples: LabelledImages) -> None:
    """The ResNet recipe's own dataset, with the same seed: the windows, mirrors and labels of a visit are one."""
    augmentation = Augmentation(5, (0.3, 1.0), (0.8, 1.25), flip=True, mixup=0.0)
    wanted = ClassificationDataset(samples, 48, 56, augmentation).__getitems__(KEYS)
    graph = ClassificationGraph(
        samples=samples, augment=True, seed=5, image_size=48, scale=(0.3, 1.0), ratio=(0.8, 1.25)
    )
    found = one_batch(graph, samples.encoded, KEYS)
    assert found["labels"].tolist() == wanted["labels"].tolist()
    difference = (grey_levels(found["images"]) - wanted["images"])[..., 1:-1, 1:-1]
    assert difference.abs().max() <= TO_TORCHVISION


def test_validation_pixels_are_those_of_torchvisions_resize_and_centre_crop(samples: LabelledImages) -> None:
    graph = ClassificationGraph(samples=samples, augment=False, image_size=112, resize_size=129)
    batch = one_batch(graph, samples.encoded, KEYS)
    transform = v2.Compose([v2.Resize(129, antialias=True), v2.CenterCrop(112)])
    for row, key in enumerate(KEYS):
        assert_same_pixels(grey_levels(batch["images"])[row], transform, pixels(samples, key.index))
    assert batch["labels"].tolist() == samples.labels[[key.index for key in KEYS]].tolist()


def test_imagenets_validation_transform_is_the_default(samples: LabelledImages) -> None:
    graph = ClassificationGraph(samples=samples, augment=False)
    found = grey_levels(one_batch(graph, samples.encoded, KEYS[:2])["images"])
    transform = v2.Compose([v2.Resize(256, antialias=True), v2.CenterCrop(224)])
    for row in range(2):
        assert_same_pixels(found[row], transform, pixels(samples, KEYS[row].index))


def test_layout_and_dtype_change_nothing_but_layout_and_dtype(samples: LabelledImages) -> None:
    def images(**options: Any) -> NDArray[Any]:
        graph = ClassificationGraph(samples=samples, augment=True, image_size=32, **options)
        return one_batch(graph, samples.encoded, KEYS)["images"]

    reference = images()
    assert np.array_equal(images(channels_last=False).transpose(0, 2, 3, 1), reference)
    half = images(dtype="fp16")
    assert half.dtype == np.float16
    assert np.array_equal(half, reference.astype(np.float16))
    assert images(dtype="fp16", channels_last=False).shape == (7, 3, 32, 32)
    assert not np.array_equal(images(flip=False), reference)


def test_a_batch_is_a_function_of_its_keys(samples: LabelledImages) -> None:
    graph = ClassificationGraph(samples=samples, augment=True, image_size=32, seed=5)
    batch = one_batch(graph, samples.encoded, KEYS)
    again = one_batch(graph, samples.encoded, KEYS[::-1])
    assert np.array_equal(batch["images"], again["images"][::-1])
    assert np.array_equal(batch["images"][0], batch["images"][-1]), "the same visit twice"
    other_epoch = graph.parameters([SampleKey(3, key.index) for key in KEYS])
    assert not np.array_equal(other_epoch["crop_start"], graph.parameters(KEYS)["crop_start"])


@pytest.mark.parametrize("augment", [True, False])
def test_grey_levels_are_what_floats_are_made_of(samples: LabelledImages, augment: bool) -> None:
    def images(**options: Any) -> NDArray[Any]:
        graph = ClassificationGraph(samples=samples, augment=augment, image_size=32, seed=1, **options)
        return one_batch(graph, samples.encoded, KEYS)["images"]

    levels, exact = images(dtype="uint8"), images(mean=(0, 0, 0), std=(1 / 255,) * 3)
    assert levels.dtype == np.uint8
    np.testing.assert_allclose(levels, exact, atol=1e-3)
    assert np.array_equal(images(dtype="uint8", channels_last=False).transpose(0, 2, 3, 1), levels)


def test_targets_take_the_place_of_labels(samples: LabelledImages) -> None:
    def targets(keys: Sequence[SampleKey]) -> dict[str, NDArray[Any]]:
        return {"twice": np.array([2 * key.index for key in keys], dtype=np.int64)}

    graph = ClassificationGraph(samples=samples, augment=True, image_size=32, targets=targets)
    batch = one_batch(graph, samples.encoded, KEYS)
    assert list(batch) == ["images", "twice"]
    assert batch["twice"].tolist() == [6, 0, 10, 2, 8, 4, 6]


def test_repeated_colours_have_the_brightness_of_interpolated_ones(samples: LabelledImages) -> None:
    """The reference of GPUs: squares of 2 x 2 pixels have one colour, and brightness is as any decoder has it."""
    data = samples.encoded.read(0)
    found = torch.from_numpy(repeated_colours(data)).double()
    wanted = pixels(samples, 0).permute(1, 2, 0).double()
    assert found.shape == wanted.shape
    assert (found - wanted).abs().mean() > 1
    inside = ((found > 0) & (found < 255) & (wanted > 0) & (wanted < 255)).all(dim=2)
    of_brightness = torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64)
    assert ((found - wanted) @ of_brightness)[inside].abs().max() <= 1.5
    blue_over_luma = (found[..., 2] - found @ of_brightness)[:374, :500].unfold(0, 2, 2).unfold(1, 2, 2)
    squares = inside[:374, :500].unfold(0, 2, 2).unfold(1, 2, 2).all(dim=(2, 3))
    assert (blue_over_luma.amax((2, 3)) - blue_over_luma.amin((2, 3)))[squares].max() <= 2


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_mixup_adds_each_image_to_its_neighbour(samples: LabelledImages, dtype: Any) -> None:
    options: dict[str, Any] = {"samples": samples, "augment": True, "image_size": 32, "seed": 5}
    plain = one_batch(ClassificationGraph(**options), samples.encoded, KEYS)
    mixed = one_batch(ClassificationGraph(**options, mixup_alpha=0.8, dtype=dtype), samples.encoded, KEYS)
    weight = mixed["mixup_weight"][:, None, None, None]
    other = np.roll(plain["images"], 1, axis=0)
    expected = weight * plain["images"] + (1 - weight) * other
    assert mixed["images"].dtype == np.dtype(np.float16 if dtype == "fp16" else np.float32)
    np.testing.assert_allclose(mixed["images"], expected, rtol=2e-3 if dtype == "fp16" else 1e-5, atol=1e-3)
    assert mixed["labels"].tolist() == plain["labels"].tolist()
    assert mixed["mixup_labels"].tolist() == np.roll(plain["labels"], 1).tolist()
    assert weight.min() > 0
    assert weight.max() < 1
    assert len(np.unique(weight)) == len(KEYS)


def test_mixup_weights_are_beta_distributed(samples: LabelledImages) -> None:
    """Mean 1/2 and variance 1 / (4 (2 alpha + 1))."""
    graph = ClassificationGraph(samples=samples, augment=True, mixup_alpha=0.4)
    weights = np.concatenate(
        [graph.parameters([SampleKey(epoch, 0)] * 100)["mixup_weight"] for epoch in range(100)]
    ).astype(float)
    assert abs(weights.mean() - 0.5) < 0.015
    assert abs(weights.var() - 1 / 7.2) < 0.005


@pytest.mark.parametrize("options", [{"augment": True}, {"augment": False}, {"augment": True, "mixup_alpha": 0.2},
                                     {"augment": True, "flip": False}])  # fmt: skip
def test_no_keys_give_arrays_of_the_same_names_and_dtypes(samples: LabelledImages, options: dict[str, Any]) -> None:
    graph = ClassificationGraph(samples=samples, **options)
    some, none = graph.parameters(KEYS), graph.parameters([])
    assert {name: (len(KEYS), *values.shape[1:]) for name, values in some.items()} == {
        name: (len(KEYS), *values.shape[1:]) for name, values in none.items()
    }
    assert {name: values.dtype for name, values in some.items()} == {
        name: values.dtype for name, values in none.items()
    }
    assert all(len(values) == 0 for values in none.values())


def test_an_image_without_a_header_is_named(tmp_path: Path) -> None:
    broken = class_folder(write_folder(tmp_path, {"a/1.jpg": encoded(), "a/2.jpg": b"\xff\xd8broken"}))
    graph = ClassificationGraph(samples=broken, augment=True)
    graph.parameters([SampleKey(0, 0)])
    with pytest.raises(DataError, match=r"'.*a/2.jpg' has no header of an image"):
        graph.parameters([SampleKey(0, 0), SampleKey(0, 1)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": (0.0, 1.0)}, r"scale is \(0.0, 1.0\); parts of an image's area are needed"),
        ({"scale": (0.5, 1.1)}, "0 < low <= high <= 1"),
        ({"ratio": (2.0, 1.0)}, r"ratio is \(2.0, 1.0\); width / height is needed"),
        ({"mixup_alpha": -1.0}, "mixup_alpha is -1.0; 0 or more is needed"),
        ({"mixup_alpha": 0.2, "dtype": "uint8"}, "mixup_alpha is 0.2, but uint8 images and targets of one's own are"),
        ({"augment": False, "resize_size": 200}, "resize_size is 200, but 224 x 224 pixels are cut out"),
    ],
)
def test_options_that_cannot_be_are_refused(samples: LabelledImages, options: dict[str, Any], message: str) -> None:
    make: Callable[..., ClassificationGraph] = ClassificationGraph
    with pytest.raises(ConfigError, match=message):
        make(**{"samples": samples, "augment": True} | options)
