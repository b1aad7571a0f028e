"""Classification batches decoded on a GPU against those decoded on the CPU."""

from typing import Any

import numpy as np
import pytest
from dali_graphs import one_batch
from encoded_images import encoded, write_folder
from PIL import Image
from repeated_colours import Repeated

from fasttrain.callbacks.dali_loader.classification import IMAGENET_STD, ClassificationGraph
from fasttrain.callbacks.dali_loader.labelled import LabelledImages, class_folder
from fasttrain.callbacks.dali_loader.reference import TOLERANCE
from fasttrain.order import SampleKey

pytestmark = pytest.mark.gpu
pytest.importorskip("nvidia.dali")

KEYS = [SampleKey(epoch, index) for epoch in range(3) for index in range(6)]
TURNS = {0: 0, 3: -1, 4: 0, 5: 0}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> LabelledImages:
    exif = Image.Exif()
    exif[0x0112] = 6
    files = {
        "a/0.jpg": encoded(500, 375, seed=0),
        "a/1.jpg": encoded(120, 333, seed=1, subsampling=0),
        "a/2.png": encoded(301, 200, kind="PNG", seed=2),
        "b/3.jpg": encoded(640, 130, seed=3, exif=exif.tobytes()),
        "b/4.jpg": encoded(90, 91, seed=4),
        "c/5.jpg": encoded(256, 341, seed=5, progressive=True),
    }
    return class_folder(write_folder(tmp_path_factory.mktemp("classes"), files))


@pytest.mark.parametrize(("augment", "window"), [(True, True), (True, False), (False, None)])
@pytest.mark.parametrize("load", [0.0, 1.0])
@pytest.mark.parametrize("fancy", [True, False])
def test_a_gpu_makes_the_same_batches(
    samples: LabelledImages, augment: bool, window: bool | None, load: float, fancy: bool
) -> None:
    options: dict[str, Any] = {"samples": samples, "augment": augment, "mixup_alpha": 0.2, "decode_window": window}
    encoded = samples.encoded if fancy else Repeated(samples.encoded, TURNS)
    wanted = one_batch(ClassificationGraph(**options), encoded, KEYS)
    graph = ClassificationGraph(**options, decoder={"hw_decoder_load": load, "jpeg_fancy_upsampling": fancy})
    found = one_batch(graph, samples.encoded, KEYS, "gpu")
    assert list(found) == list(wanted)
    for name in set(found) - {"images"}:
        assert np.array_equal(found[name], wanted[name]), name
        assert found[name].dtype == wanted[name].dtype
    apart = np.abs(found["images"] - wanted["images"]) * 255 * np.array(IMAGENET_STD)
    largest, mean = TOLERANCE["gpu"]
    assert float(apart.max()) <= largest
    assert float(apart.mean(axis=(1, 2, 3)).max()) <= mean, "of the image that is farthest"


def test_half_precision_rounds_the_same_values(samples: LabelledImages) -> None:
    options: dict[str, Any] = {"samples": samples, "augment": True, "mixup_alpha": 0.2}
    single = one_batch(ClassificationGraph(**options), samples.encoded, KEYS, "gpu")["images"]
    half = one_batch(ClassificationGraph(**options, dtype="fp16"), samples.encoded, KEYS, "gpu")["images"]
    assert half.dtype == np.float16
    np.testing.assert_allclose(half.astype(np.float32), single, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("augment", [True, False])
def test_grey_levels_are_what_floats_are_made_of(samples: LabelledImages, augment: bool) -> None:
    options: dict[str, Any] = {"samples": samples, "augment": augment, "mean": (0, 0, 0), "std": (1 / 255,) * 3}
    levels, floats = (
        one_batch(ClassificationGraph(**options, dtype=dtype), samples.encoded, KEYS, "gpu")["images"]
        for dtype in ("uint8", "fp32")
    )
    assert levels.dtype == np.uint8
    np.testing.assert_allclose(levels, floats, atol=1e-3)
