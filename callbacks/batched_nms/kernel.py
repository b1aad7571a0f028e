# mypy: ignore-errors
"""The Triton kernel: greedy suppression, a program an image, which ends as soon as the image has its detections.

Candidates come best first, so those kept first are the result, and the rest need not be looked at. A tile of candidates
is compared with what has been kept so far and then with itself; within the tile what is kept is found by going round
until nothing changes, which is the greedy answer, since each candidate depends on better ones alone.

The arithmetic is torchvision's, operation by operation: to be compiled without `enable_fp_fusion`.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # as decided when this module is imported


@triton.jit
def suppress_kernel(
    boxes_at, labels_at, end_at, kept_boxes_at, kept_labels_at, kept_at, count_at, candidates, most, iou_threshold,
    CONTRACTED: tl.constexpr, TILE: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Find what is kept of an image.

    Args:
        boxes_at: float32 (images, candidates, 4) xyxy, best first.
        labels_at: int32 (images, candidates); candidates of different labels let each other be.
        end_at: int32 (images,), how many candidates take part, from the first on.
        kept_boxes_at: float32 (images, most, 4), written up to the count.
        kept_labels_at: int32 (images, most), written up to the count.
        kept_at: int32 (images, most), written up to the count: which candidates are kept, ascending.
        count_at: int64 (images,), written.
        candidates, most: as above.
        iou_threshold: a greater IoU suppresses.
        CONTRACTED: round a sum of areas as nvcc does, or as a CPU does.
        TILE: candidates looked at together.
        KEPT: of those kept, how many they are compared with together.
    """
    image = tl.program_id(0).to(tl.int64)
    boxes_at += image * candidates * 4
    labels_at += image * candidates
    kept_boxes_at += image * most * 4
    kept_labels_at += image * most
    kept_at += image * most
    end = tl.load(end_at + image)
    lane = tl.arange(0, TILE)
    count = end * 0
    start = end * 0
    while (start < end) & (count < most):
        at = start + lane
        there = at < end
        x1, y1, x2, y2, label = _load(boxes_at, labels_at, at, there)
        hit = tl.zeros((TILE,), dtype=tl.int32)
        first = count * 0
        while first < count:
            slot = first + tl.arange(0, KEPT)
            filled = slot < count
            kx1, ky1, kx2, ky2, kept_label = _load(kept_boxes_at, kept_labels_at, slot, filled)
            over = _overlaps(
                kx1[None, :], ky1[None, :], kx2[None, :], ky2[None, :], x1[:, None], y1[:, None], x2[:, None],
                y2[:, None], iou_threshold, CONTRACTED,
            )  # fmt: skip
            over = over & filled[None, :] & (kept_label[None, :] == label[:, None])
            hit = tl.maximum(hit, tl.max(over.to(tl.int32), axis=1))
            first += KEPT
        alive = there.to(tl.int32) * (1 - hit)
        # Row by row the candidate, column by column the better ones that may suppress it.
        over = _overlaps(
            x1[None, :], y1[None, :], x2[None, :], y2[None, :], x1[:, None], y1[:, None], x2[:, None], y2[:, None],
            iou_threshold, CONTRACTED,
        )  # fmt: skip
        by = (over & (lane[None, :] < lane[:, None]) & (label[None, :] == label[:, None])).to(tl.int32)
        keeps = alive
        changed = count * 0 + 1
        while changed > 0:
            still = alive * (1 - tl.max(by * keeps[None, :], axis=1))
            changed = tl.sum((still != keeps).to(tl.int32), axis=0)
            keeps = still
        slot = count + tl.cumsum(keeps, axis=0) - 1
        stored = (keeps > 0) & (slot < most)
        tl.store(kept_at + slot, at, mask=stored)
        tl.store(kept_labels_at + slot, label, mask=stored)
        tl.store(kept_boxes_at + slot * 4, x1, mask=stored)
        tl.store(kept_boxes_at + slot * 4 + 1, y1, mask=stored)
        tl.store(kept_boxes_at + slot * 4 + 2, x2, mask=stored)
        tl.store(kept_boxes_at + slot * 4 + 3, y2, mask=stored)
        count = tl.minimum(count + tl.sum(keeps, axis=0), most)
        start += TILE
        tl.debug_barrier()  # what was stored is read by the other threads of the program
    tl.store(count_at + image, count.to(tl.int64))


@triton.jit
def _load(boxes_at, labels_at, at, there):
    x1 = tl.load(boxes_at + at * 4, mask=there, other=0.0)
    y1 = tl.load(boxes_at + at * 4 + 1, mask=there, other=0.0)
    x2 = tl.load(boxes_at + at * 4 + 2, mask=there, other=0.0)
    y2 = tl.load(boxes_at + at * 4 + 3, mask=there, other=0.0)
    return x1, y1, x2, y2, tl.load(labels_at + at, mask=there, other=-1)


@triton.jit
def _overlaps(ax1, ay1, ax2, ay2, bx1, by1, bx2, by2, iou_threshold, CONTRACTED: tl.constexpr):
    """Return whether the IoU of a better box a and a worse one b is above the threshold; not if it is 0 / 0."""
    width = tl.maximum(tl.minimum(ax2, bx2) - tl.maximum(ax1, bx1), 0.0)
    height = tl.maximum(tl.minimum(ay2, by2) - tl.maximum(ay1, by1), 0.0)
    intersection = width * height
    area = (ax2 - ax1) * (ay2 - ay1)
    both = tl.fma(bx2 - bx1, by2 - by1, area) if CONTRACTED else area + (bx2 - bx1) * (by2 - by1)
    union = both - intersection
    divides = union != 0
    iou = tl.math.div_rn(intersection, tl.where(divides, union, 1.0))
    return divides & (iou > iou_threshold)
