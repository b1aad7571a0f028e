"""Masks of detections: as bits and back, pasted as others paste them, encoded to pycocotools' bytes in any process."""

import subprocess

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocotools import mask as judge
from torchvision.models.detection.roi_heads import paste_masks_in_image

from fasttrain import coco_masks
from fasttrain.coco_masks import encode, mask_rows, packed, pasted, unpacked


def detections(boxes: np.ndarray) -> np.ndarray:
    count = len(boxes)
    return np.column_stack([np.zeros(count), boxes, np.ones(count), np.zeros(count)])


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 3), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None, database=None)
def test_bits_and_back(height: int, width: int, beyond: int, seed: int) -> None:
    masks = torch.from_numpy(np.random.default_rng(seed).random((3, height + beyond, width + beyond)) < 0.5)
    bits = packed(masks)
    assert bits.dtype == torch.uint8
    assert tuple(bits.shape) == (3, width + beyond, -(-(height + beyond) // 8))
    for one, mask in zip(bits.numpy(), masks.numpy(), strict=True):
        np.testing.assert_array_equal(unpacked(one, np.zeros(4), (height, width)), mask[:height, :width])


@given(st.integers(0, 10**6))
@settings(max_examples=40, deadline=None, database=None)
def test_pasting_is_torchvisions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    height, width = rng.integers(20, 200, 2)
    corner, size = rng.uniform(-20, 18, 2), rng.uniform(20.5, 120, 2)
    mask = rng.random((28, 28)).astype(np.float32)
    box = torch.tensor([[*corner, *(corner + size)]], dtype=torch.float32)
    expected = paste_masks_in_image(torch.from_numpy(mask)[None, None], box, (int(height), int(width)))[0, 0]
    xyxy = box[0].double().numpy()
    found = pasted(mask, np.concatenate([xyxy[:2], xyxy[2:] - xyxy[:2]]), (int(height), int(width)))
    # Sums of products in another order: a pixel may be apart where its value is within rounding of the threshold.
    differing = found != (expected.numpy() > 0.5)
    assert differing.sum() <= 1 + 1e-4 * found.size
    assert found.flags.f_contiguous
    for outside in (width + 5.0, -size[0] - 9):
        assert not pasted(mask, np.array([outside, 0, *size]), (int(height), int(width))).any()


def test_encoding_equals_pycocotools_in_any_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    masks = rng.random((300, 30, 50)) < rng.random((300, 1, 1))
    rows = mask_rows(detections(np.zeros((300, 4))), packed(torch.from_numpy(masks)).numpy())
    rows["detection"][100:, 0] = 7
    sizes = {0: (30, 50), 7: (21, 33)}
    cut = [mask[: sizes[int(image)][0], : sizes[int(image)][1]]
           for mask, image in zip(masks, rows["detection"][:, 0], strict=True)]  # fmt: skip
    expected = [judge.encode(np.asfortranarray(mask.astype(np.uint8))) for mask in cut]
    assert encode(rows, sizes) == expected, "too few to be worth a process"
    monkeypatch.setattr(coco_masks, "WORTH_A_PROCESS", 50)
    assert encode(rows, sizes, processes=3) == expected
    with pytest.raises(KeyError, match="7"):
        encode(rows, {0: (30, 50)})
    monkeypatch.setattr(coco_masks, "__file__", "/nowhere.py")
    with pytest.raises(subprocess.CalledProcessError):
        encode(rows, sizes, processes=2)


def test_probabilities_are_pasted_and_encoded() -> None:
    boxes = np.array([[2.0, 3.0, 20.0, 10.0], [30.0, 20.0, 40.0, 40.0]])
    masks = np.ones((2, 14, 14), np.float16)
    rows = mask_rows(detections(boxes), masks)
    assert rows.dtype.itemsize == 7 * 8 + 14 * 14 * 2
    first, second = (judge.decode(found) for found in encode(rows, {0: (50, 60)}))
    assert first.sum() == pytest.approx(200, rel=0.15)
    assert second[20:, 30:].mean() > 0.95, "and cut at the image's borders"
    assert second[:19].sum() == second[:, :29].sum() == 0
