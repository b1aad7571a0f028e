# mypy: ignore-errors
"""The Triton kernels: an image's real boxes are listed, then tiles of anchors go through the list, twice at most.

IoUs are compared as integers: the bits of floats from 0 on are in the order of the floats, and NaN, always written by
the same bits, is above all of them. So a maximum has NaN in it as torch's has, and can be taken by atomics, whose order
changes nothing about it.

The arithmetic is that of the plain operators, one rounding each: it has to be compiled without `enable_fp_fusion`.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # as decided when this module is imported
PADDING_LABEL = tl.constexpr(-1)
BACKGROUND = tl.constexpr(-1)
BETWEEN_THRESHOLDS = tl.constexpr(-2)
NAN_BITS = tl.constexpr(0x7FC00000)
NO_IOU = tl.constexpr(-1)  # less than the bits of any IoU; as a float it is NaN, which reaches no threshold


@triton.jit
def list_boxes_kernel(
    boxes, labels, count_at, index_at, corners_at, highest_at, most,
    box_stride_0, box_stride_1, box_stride_2, label_stride_0, label_stride_1, BLOCK: tl.constexpr,
):  # fmt: skip
    """List the real boxes of an image, in their order; a program each.

    Args:
        boxes: float32 (images, most, 4) in any layout.
        labels: int32 or int64 (images, most) in any layout; PADDING_LABEL where there is no box.
        count_at: int32 (images,), written: how many boxes are real.
        index_at: int32 (images, most), written up to the count: where in the row each real box stands.
        corners_at: float32 (images, most, 4), written up to the count: the boxes.
        highest_at: int32 (images, most), written up to the count: 0.
        most: boxes there is room for.
        BLOCK: boxes looked at together.
    """
    image = tl.program_id(0).to(tl.int64)
    row = image * most
    count = 0
    for start in range(0, most, BLOCK):
        at = start + tl.arange(0, BLOCK)
        label_at = labels + image * label_stride_0 + at.to(tl.int64) * label_stride_1
        label = tl.load(label_at, mask=at < most, other=PADDING_LABEL)
        real = label != PADDING_LABEL
        slot = row + count + tl.cumsum(real.to(tl.int32), axis=0) - 1
        tl.store(index_at + slot, at, mask=real)
        tl.store(highest_at + slot, 0, mask=real)
        box_at = boxes + image * box_stride_0 + at.to(tl.int64) * box_stride_1
        for corner in tl.static_range(4):
            value = tl.load(box_at + corner * box_stride_2, mask=real)
            tl.store(corners_at + slot * 4 + corner, value, mask=real)
        count += tl.sum(real.to(tl.int32), axis=0)
    tl.store(count_at + image, count)


@triton.jit
def match_kernel(
    anchors, count_at, index_at, corners_at, highest_at, highest_of_tile_at, matched_at, anchor_count, tiles, most,
    foreground_iou, background_iou, RESCUE: tl.constexpr, BLOCK: tl.constexpr, SCANNED: tl.constexpr,
):  # fmt: skip
    """Match a tile of an image's anchors, a program each. The second launch, with RESCUE, looks at few tiles.

    The first writes what the thresholds decide, and finds each box's highest IoU, in the tile and in all. The second
    does those tiles again that hold a highest one, which are matched however low it is. A box that lies apart from a
    whole tile has IoUs of 0 there without being computed; if it has an area, so that none can be 0 / 0.

    Args:
        anchors: float32 (anchor_count, 4), contiguous, finite; x1 <= x2 and y1 <= y2.
        count_at, index_at, corners_at: from `list_boxes_kernel`.
        highest_at: int32 (images, most): bits of each listed box's highest IoU; raised by the first launch.
        highest_of_tile_at: int32 (images, tiles, most): the same within a tile; written by the first launch.
        matched_at: int64 (images, anchor_count), written: the box's place in its row, BACKGROUND, BETWEEN_THRESHOLDS.
        anchor_count: anchors of an image.
        tiles: of BLOCK anchors, the last perhaps in part.
        most: boxes there is room for.
        foreground_iou, background_iou: the thresholds.
        RESCUE: whether this is the second launch.
        BLOCK: anchors of a tile, a power of two.
        SCANNED: boxes looked at together to see whether a tile holds the highest of any.
    """
    program = tl.program_id(0)
    tile, image = program % tiles, (program // tiles).to(tl.int64)
    row = image * most
    count = tl.load(count_at + image)
    highest_of_tile_at += (image * tiles + tile) * most
    if RESCUE:
        rescues = 0
        for start in range(0, count, SCANNED):
            slot = start + tl.arange(0, SCANNED)
            here = tl.load(highest_of_tile_at + slot, mask=slot < count, other=0)
            anywhere = tl.load(highest_at + row + slot, mask=slot < count, other=1)
            rescues = tl.maximum(rescues, tl.max((here == anywhere).to(tl.int32), axis=0))
        if rescues == 0:
            return
    at = tile * BLOCK + tl.arange(0, BLOCK)
    # Beyond the end stands the last anchor again: it changes no maximum.
    anchor = anchors + tl.minimum(at, anchor_count - 1) * 4
    x1, y1, x2, y2 = tl.load(anchor), tl.load(anchor + 1), tl.load(anchor + 2), tl.load(anchor + 3)
    area = (x2 - x1) * (y2 - y1)
    left, top, right, bottom = tl.min(x1, axis=0), tl.min(y1, axis=0), tl.max(x2, axis=0), tl.max(y2, axis=0)
    best = tl.full([BLOCK], NO_IOU, tl.int32)
    matched = tl.full([BLOCK], BACKGROUND, tl.int32)
    rescued = tl.zeros([BLOCK], tl.int32)
    for slot in range(count):
        corner = corners_at + (row + slot) * 4
        box_x1, box_y1, box_x2, box_y2 = tl.load(corner), tl.load(corner + 1), tl.load(corner + 2), tl.load(corner + 3)
        box_area = (box_x2 - box_x1) * (box_y2 - box_y1)
        apart = (box_x1 >= right) | (box_x2 <= left) | (box_y1 >= bottom) | (box_y2 <= top)
        iou = tl.zeros([BLOCK], tl.int32)
        highest = 0
        if ~(apart & (box_area > 0)):
            iou = _iou_bits(box_x1, box_y1, box_x2, box_y2, box_area, x1, y1, x2, y2, area)
            if not RESCUE:
                highest = tl.max(iou, axis=0)
                tl.atomic_max(highest_at + row + slot, highest, sem="relaxed")
        # Strictly greater: of equal boxes the first one wins.
        matched = tl.where(iou > best, tl.load(index_at + row + slot), matched)
        best = tl.maximum(best, iou)
        if RESCUE:
            rescued = tl.where(iou == tl.load(highest_at + row + slot), 1, rescued)
        else:
            tl.store(highest_of_tile_at + slot, highest)
    iou = best.to(tl.float32, bitcast=True)
    is_foreground = (iou >= foreground_iou) | ((rescued != 0) & (iou == iou))
    unmatched = tl.where((iou >= background_iou) & (iou < foreground_iou), BETWEEN_THRESHOLDS, BACKGROUND)
    result = tl.where(is_foreground, matched, unmatched).to(tl.int64)
    tl.store(matched_at + image * anchor_count + at, result, mask=at < anchor_count)


@triton.jit
def _iou_bits(box_x1, box_y1, box_x2, box_y2, box_area, x1, y1, x2, y2, area):
    """Return the bits of the IoU of a box with anchors: NAN_BITS where it is 0 / 0 or a corner is NaN."""
    width = tl.maximum(tl.minimum(box_x2, x2) - tl.maximum(box_x1, x1), 0.0)
    height = tl.maximum(tl.minimum(box_y2, y2) - tl.maximum(box_y1, y1), 0.0)
    intersection = width * height
    union = box_area + area - intersection
    # Most pairs don't overlap, and a division of 0 takes the slow way.
    overlap = intersection > 0
    iou = tl.math.div_rn(tl.where(overlap, intersection, 1.0), tl.where(overlap, union, 1.0))
    bits = tl.where(overlap, iou, 0.0).to(tl.int32, bitcast=True)
    return tl.where(tl.abs(union) > 0, bits, NAN_BITS)
