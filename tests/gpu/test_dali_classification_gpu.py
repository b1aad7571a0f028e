"""Classification batches decoded on a GPU against those decoded on the CPU."""

from typing import Any

import numpy as np
import pytest
from dali_graphs import one_batch
from encoded_images import encoded, write_folder
from numpy.typing import NDArray
from PIL import Image

from fasttrain.callbacks.dali_loader.classification import IMAGENET_STD, ClassificationGraph
from fasttrain.callbacks.dali_loader.labelled import LabelledImages, class_folder
from fasttrain.order import SampleKey

pytestmark = pytest.mark.gpu
pytest.importorskip("nvidia.dali")

KEYS = [SampleKey(epoch, index) for epoch in range(3) for index in range(6)]
# Grey levels: the GPU's inverse transform of JPEG's blocks rounds otherwise than libjpeg-turbo's, and unless told to
# it repeats colours where that interpolates them.
MEAN, MEAN_REPEATED = 1.0, 4.0


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


def grey_levels(one: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
    """Return how far two channels-last batches are apart, for each image on average."""
    difference = np.abs(one.astype(np.float32) - other.astype(np.float32)) * 255 * np.array(IMAGENET_STD)
    return np.asarray(difference.mean(axis=(1, 2, 3)))


@pytest.mark.parametrize("augment", [True, False])
@pytest.mark.parametrize("window", [True, False])
@pytest.mark.parametrize("load", [0.0, 0.9])
def test_a_gpu_makes_the_same_batches(samples: LabelledImages, augment: bool, window: bool, load: float) -> None:
    options: dict[str, Any] = {"samples": samples, "augment": augment, "mixup_alpha": 0.2, "decode_window": window}
    expected = one_batch(ClassificationGraph(**options), samples.encoded, KEYS)
    for fancy, limit in ((True, MEAN), (False, MEAN_REPEATED)):
        decoder = {"hw_decoder_load": load, "jpeg_fancy_upsampling": fancy}
        batch = one_batch(ClassificationGraph(**options, decoder=decoder), samples.encoded, KEYS, "gpu")
        assert list(batch) == list(expected)
        assert grey_levels(batch["images"], expected["images"]).max() < limit
        for name in set(batch) - {"images"}:
            assert np.array_equal(batch[name], expected[name]), name
            assert batch[name].dtype == expected[name].dtype


def test_half_precision_rounds_the_same_values(samples: LabelledImages) -> None:
    options: dict[str, Any] = {"samples": samples, "augment": True, "mixup_alpha": 0.2}
    single = one_batch(ClassificationGraph(**options), samples.encoded, KEYS, "gpu")["images"]
    half = one_batch(ClassificationGraph(**options, dtype="fp16"), samples.encoded, KEYS, "gpu")["images"]
    assert half.dtype == np.float16
    np.testing.assert_allclose(half.astype(np.float32), single, rtol=1e-3, atol=1e-3)
