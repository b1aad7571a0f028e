"""The Triton kernel: one pass over the logits of all levels that yields the loss and writes the gradient.

With L(x) = sigmoid(x)^gamma softplus(x), a logit of the background costs (1 - alpha) L(x) and that of an anchor's own
class alpha L(-x) (Lin et al., arXiv 1708.02002, eq. 5). All logits are taken as background; the one logit of a
foreground anchor is corrected afterwards, by the few tiles that have one.

What bounds it on an H200: 2 bytes in and 2 out per logit at 4.3 TB/s are about 27 cycles of each quarter of a
multiprocessor for 32 logits. The special-function unit takes 8 of them for an exp2, log2 or reciprocal, an instruction
of any other kind 1. So there are two of the former and a half (one reciprocal serves two logits), and about 18 of the
latter, and all of it hides behind the memory's time, if barely.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # as decided when this module is imported
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# exp2 of it, squared, is still a float32: see `_reciprocal`. Beyond it sigmoid is 1 and softplus the logit itself.
HIGHEST_EXPONENT = tl.constexpr(62.0)


@triton.jit
def focal_loss_kernel(
    levels, gradients, targets, foreground, factor_at, used_at, result_at,
    anchors, level_strides, gradient_strides, target_stride, batch, alpha, gamma,
    CLASSES: tl.constexpr, WIDTH: tl.constexpr, VECTORS: tl.constexpr, ROWS: tl.constexpr, ROWS_PADDED: tl.constexpr,
    SQUARE: tl.constexpr, TERMS: tl.constexpr, BACKWARD: tl.constexpr, WITH_GRADIENT: tl.constexpr,
):  # fmt: skip
    """Write loss sums (forward) and gradients; a program takes every n-th tile of ROWS anchors of one image.

    Args:
        levels: pointers to logits of each level, (batch, anchors[i], CLASSES), rows contiguous.
        gradients: pointers to as many tensors, of the same kind; may be the levels themselves.
        targets: int32 or int64 (batch, anchors of all levels): class index, -1 background, less: ignored.
        foreground: integers (batch,), the number of foreground anchors of each image.
        factor_at: float32 scalar that the gradient is multiplied with: forward, the expected gradient of the loss;
            backward, the real one.
        used_at: float32 scalar: the forward writes the factor there. In the backward nothing is done if it holds the
            factor already, since the gradients are then as they should be.
        result_at: forward, float32 (programs,) for the loss sums. Backward, where the next forward expects its factor.
        anchors: of each level.
        level_strides: from image to image, in vectors of WIDTH logits.
        gradient_strides: likewise.
        target_stride: from image to image, in elements.
        batch: images.
        alpha: weight of the foreground class.
        gamma: exponent; not read if SQUARE.
        CLASSES: logits of an anchor.
        WIDTH: logits of a vector; divides CLASSES and the address of each row.
        VECTORS: of a tile, a power of two; ROWS anchors fill all but a few.
        ROWS: anchors of a tile.
        ROWS_PADDED: the power of two from ROWS on.
        SQUARE: gamma is 2.
        TERMS: of log(1 + u)'s series where u is small: 0, 2 or 4.
        BACKWARD: which of the two this is.
        WITH_GRADIENT: write gradients.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    factor = tl.load(factor_at)
    if BACKWARD:
        if program == 0:
            tl.store(result_at, factor)
        if factor == tl.load(used_at):
            return
    elif program == 0:
        tl.store(used_at, factor)
    vectors_of_row: tl.constexpr = CLASSES // WIDTH
    row_of_vector = tl.arange(0, VECTORS) // vectors_of_row
    inside_tile = tl.arange(0, VECTORS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    rows = tl.arange(0, ROWS_PADDED)
    background_sum = tl.zeros([VECTORS], tl.float32)
    foreground_sum = tl.zeros([ROWS_PADDED], tl.float32)
    tiles_before = 0
    for level in tl.static_range(len(levels)):
        of_level = anchors[level]
        tiles = (of_level + ROWS - 1) // ROWS
        # The levels' tiles are dealt out in turn, as if they were one row, so that no program has two more than others.
        tile = (program + programs - tiles_before % programs) % programs
        image = tile // tiles
        tile -= image * tiles
        while image < batch:
            first_row = tile * ROWS
            count = tl.minimum(of_level - first_row, ROWS)
            target_at = targets + image.to(tl.int64) * target_stride + first_row
            of_vector = tl.load(target_at + row_of_vector, mask=row_of_vector < count, other=-2)
            of_row = tl.load(target_at + rows, mask=rows < count, other=-2).to(tl.int32)
            logits_at = levels[level] + (image.to(tl.int64) * level_strides[level] + first_row * vectors_of_row) * WIDTH
            # Ignored anchors are not read: whatever is there, NaN too, has neither loss nor gradient.
            x = tl.load(logits_at + inside_tile, mask=(of_vector >= -1)[:, None], other=float("-inf")).to(tl.float32)
            weight = 1.0 / (tl.maximum(tl.load(foreground + image).to(tl.int32), 1) * batch).to(tl.float32)
            loss, slope = _background(x, gamma, SQUARE, TERMS)
            if not BACKWARD:
                background_sum += tl.sum(loss, axis=1) * (weight * (1 - alpha) * LN2)
            has_foreground = tl.max(of_row) >= 0
            if WITH_GRADIENT:
                dtype = gradients[level].dtype.element_ty
                gradient_at = (
                    gradients[level]
                    + (image.to(tl.int64) * gradient_strides[level] + first_row * vectors_of_row) * WIDTH
                )
            if has_foreground:
                is_class = (of_row >= 0) & (of_row < CLASSES)
                own_class = rows * CLASSES + of_row
                own = tl.load(logits_at + own_class, mask=is_class, other=float("-inf")).to(tl.float32)
                as_background, _ = _background(own, gamma, SQUARE, TERMS)
                own_loss, own_slope = _background(-own, gamma, SQUARE, TERMS)
                if not BACKWARD:
                    correction = (own_loss * alpha - as_background * (1 - alpha)) * (weight * LN2)
                    # A class that isn't one of the K must not pass for background: there is no way to raise from here.
                    correction = tl.where(is_class, correction, float("nan"))
                    foreground_sum += tl.where(of_row >= 0, correction, 0.0)
                if WITH_GRADIENT:
                    # The tile is written by other threads than those that read its classes before, where gradients
                    # take the logits' place, and those that write them after.
                    tl.debug_barrier()
                    tl.store(
                        gradient_at + inside_tile,
                        (slope * (weight * (1 - alpha) * factor)).to(dtype),
                        mask=(row_of_vector < count)[:, None],
                    )
                    tl.debug_barrier()
                    tl.store(gradient_at + own_class, (own_slope * (-alpha * weight * factor)).to(dtype), mask=is_class)
            elif WITH_GRADIENT:
                tl.store(
                    gradient_at + inside_tile,
                    (slope * (weight * (1 - alpha) * factor)).to(dtype),
                    mask=(row_of_vector < count)[:, None],
                )
            tile += programs % tiles
            image += programs // tiles
            if tile >= tiles:
                tile -= tiles
                image += 1
        tiles_before += tiles * batch
        targets += of_level
    if not BACKWARD:
        tl.store(result_at + program, tl.sum(background_sum) + tl.sum(foreground_sum))
