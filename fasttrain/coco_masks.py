"""Masks of detections on their way to a scorer: small on the training path, COCO's run lengths on the other side.

`mask_rows` makes arrays of fixed-size rows, cheap to make, to copy and to join. `encode` makes run-length encodings of
them, in several processes; it needs neither torch nor the device. Such a process is this file, run as a script.
"""

import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # a scoring process imports this module, and has no use for torch
    from torch import Tensor

Encoded = dict[str, Any]
"""COCO's compressed run lengths: `size`, height and width, and `counts`, bytes."""

PADDING = 1
"""Pixels of nothing around a mask in a box before it is resized; origin: Mask R-CNN (Detectron's and torchvision's)."""
THRESHOLD = 0.5
WORTH_A_PROCESS = 500
"""Masks; fewer are encoded before another process has started, which takes a fifth of a second."""


def mask_rows(detections: NDArray[np.float64], masks: NDArray[Any]) -> NDArray[Any]:
    """Return rows with the fields `detection`, seven float64, and `mask`, to be given to `encode` in the end.

    Args:
        detections: (N, 7) image id, x, y, width, height, score, category id, in pixels of the original image.
        masks: either (N, M, M) floating point, Mask R-CNN's probabilities, stretched over each detection's box; or
            (N, W, B) uint8, `packed` masks of whole images.
    """
    rows = np.empty(len(detections), dtype=[("detection", "<f8", (7,)), ("mask", masks.dtype, masks.shape[1:])])
    rows["detection"], rows["mask"] = detections, masks
    return rows


def packed(masks: "Tensor") -> "Tensor":
    """Return masks of whole images as bits, on their device: (N, H, W) bool to (N, W, ceil(H / 8)) uint8.

    Images of several sizes lie at the top left of masks of one size.
    """
    count, height, width = masks.shape
    columns = masks.new_zeros((count, width, -(-height // 8) * 8)).byte()
    columns[..., :height] = masks.transpose(1, 2)
    places = columns.new_tensor([128, 64, 32, 16, 8, 4, 2, 1])
    bits: Tensor = (columns.unflatten(2, (-1, 8)) * places).sum(3, dtype=columns.dtype)
    return bits


def encode(rows: NDArray[Any], sizes: Mapping[int, tuple[int, int]], processes: int | None = None) -> list[Encoded]:
    """Return COCO's run-length encoding of each row's mask, the bytes that pycocotools would make of it.

    Args:
        rows: of `mask_rows`.
        sizes: height and width of each image by its id.
        processes: None is as many as OMP_NUM_THREADS says, or this machine has cores; never more than pay.

    Raises:
        KeyError: a row's image has no size.
        CalledProcessError: one of the processes failed or was killed.
    """
    sizes = {image: sizes[image] for image in {int(image) for image in rows["detection"][:, 0]}}
    count = max(1, min(processes or _given_threads(), len(rows) // WORTH_A_PROCESS))
    if count == 1:
        return _encode(rows, sizes)
    found: list[Any] = [None] * len(rows)
    with ThreadPoolExecutor(count) as pool:  # each waits for a process
        shares = pool.map(partial(_encode_elsewhere, sizes=sizes), [rows[first::count] for first in range(count)])
        for first, share in enumerate(shares):
            found[first::count] = share
    return found


def _encode(rows: NDArray[Any], sizes: Mapping[int, tuple[int, int]]) -> list[Encoded]:
    decode = unpacked if rows["mask"].dtype == np.uint8 else pasted
    to_bytes = _encoder()
    images, boxes = rows["detection"][:, 0].astype(np.int64).tolist(), rows["detection"][:, 1:5]
    return [
        to_bytes(decode(mask, box, sizes[image]))
        for mask, box, image in zip(rows["mask"], boxes, images, strict=True)
    ]  # fmt: skip


def _encode_elsewhere(rows: NDArray[Any], sizes: Mapping[int, tuple[int, int]]) -> list[Encoded]:
    """Do it in a process that ends with that, or when nobody reads what it found."""
    done = subprocess.run(
        [sys.executable, "-P", __file__],
        input=pickle.dumps((np.ascontiguousarray(rows), sizes), protocol=pickle.HIGHEST_PROTOCOL),
        stdout=subprocess.PIPE,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    masks: list[Encoded] = pickle.loads(done.stdout)
    return masks


def unpacked(bits: NDArray[np.uint8], box: NDArray[np.float64], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Return one of the `packed` masks, cut to an image of (height, width); the box plays no part."""
    height, width = size
    return np.unpackbits(bits[:width], axis=1, count=height).T  # Fortran's order, which an encoder reads


def pasted(mask: NDArray[Any], box: NDArray[np.float64], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Return the mask of an image of (height, width) that a mask in a box stands for, in Fortran's order.

    The box, grown by the padding, is rounded down to whole pixels, the padded mask resized to it bilinearly, and every
    pixel above THRESHOLD set: maskrcnn-benchmark's `paste_mask_in_image`, and torchvision's.

    Args:
        mask: (M, M) probabilities.
        box: x, y, width and height in pixels.
    """
    height, width = size
    image = np.zeros((width, height), dtype=np.uint8)  # transposed; pages that no box touches are never written
    side = len(mask) + 2 * PADDING
    centre, half = box[:2] + box[2:] / 2, box[2:] / 2 * (side / len(mask))
    # Rounded as float32, in which boxes are kept where this comes from.
    left, top, right, bottom = (int(value) for value in np.concatenate([centre - half, centre + half]).astype("f4"))
    columns, rows = max(right - left + 1, 1), max(bottom - top + 1, 1)
    x0, x1, y0, y1 = max(left, 0), min(left + columns, width), max(top, 0), min(top + rows, height)
    if x0 < x1 and y0 < y1:
        whole = np.zeros((side, side), dtype=np.float32)
        whole[PADDING:-PADDING, PADDING:-PADDING] = mask
        down = _bilinear(side, rows)[y0 - top : y1 - top]
        across = _bilinear(side, columns)[x0 - left : x1 - left]
        image[x0:x1, y0:y1] = (across @ whole.T @ down.T) > THRESHOLD
    return image.T


def _bilinear(given: int, wanted: int) -> NDArray[np.float32]:
    """Return the (wanted, given) weights of linear interpolation between pixel centres, borders repeated."""
    place = np.maximum((np.arange(wanted, dtype=np.float32) + 0.5) * np.float32(given / wanted) - 0.5, 0)
    first = np.minimum(place.astype(np.int64), given - 1)
    share = (place - first).astype(np.float32)
    weights = np.zeros((wanted, given), dtype=np.float32)
    line = np.arange(wanted)
    weights[line, first] = 1 - share
    weights[line, np.minimum(first + 1, given - 1)] += share
    return weights


def _encoder() -> Callable[[NDArray[np.uint8]], Encoded]:
    """Return hotcoco's encoder, or pycocotools'; both make the same bytes."""
    try:
        library = importlib.import_module("hotcoco.mask")
    except ImportError:
        library = importlib.import_module("pycocotools.mask")

    def to_bytes(mask: NDArray[np.uint8]) -> Encoded:
        encoded: Encoded = library.encode(np.asfortranarray(mask))
        return encoded

    return to_bytes


def _given_threads() -> int:
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) else os.cpu_count() or 1


if __name__ == "__main__":
    sys.stdout.buffer.write(pickle.dumps(_encode(*pickle.load(sys.stdin.buffer))))
