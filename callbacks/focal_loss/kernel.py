# mypy: ignore-errors
"""The Triton kernel: one pass over the logits of all levels that adds up the loss and writes the gradient.

With L(x) = sigmoid(x)^gamma softplus(x), a logit of the background costs (1 - alpha) L(x) and that of an anchor's own
class alpha L(-x) (Lin et al., arXiv 1708.02002, eq. 5). All logits are taken as background; the one of a foreground
anchor's own class is corrected afterwards, in the few tiles that have any. (To leave it out of the sum from the start
would spare the loss a rounding and cost half as many registers again, for all tiles.)

What bounds it on an H200: 2 bytes in and 2 out per logit, at 4.3 TB/s, leave each quarter of a multiprocessor about
27 cycles for 32 logits. Its special-function unit takes 8 of them for an exp2, log2 or reciprocal, and the scheduler 1
for any instruction. So there are two and a half of the former (one reciprocal serves two logits) and about 24 of all.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # as decided when this module is imported
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# 2 to this power can be squared in float32, see `_reciprocal`. Beyond it sigmoid is 1, and softplus the logit itself.
HIGHEST_EXPONENT = tl.constexpr(62.0)


@triton.jit
def focal_loss_kernel(
    levels, gradients, targets, foreground, factor_at, used_at, result_at,
    anchors, level_strides, gradient_strides, target_stride, batch, alpha, gamma,
    CLASSES: tl.constexpr, WIDTH: tl.constexpr, VECTORS: tl.constexpr, ROWS: tl.constexpr, ROWS_PADDED: tl.constexpr,
    SQUARE: tl.constexpr, TERMS: tl.constexpr, BACKWARD: tl.constexpr, WITH_GRADIENT: tl.constexpr,
    IN_PLACE: tl.constexpr,
):  # fmt: skip
    """Add up the loss (forward alone) and write gradients; a program takes every n-th tile of ROWS anchors of an image.

    Args:
        levels: pointers to the logits of each level, (batch, anchors[i], CLASSES), rows contiguous.
        gradients: pointers to as many tensors of the same kind.
        targets: int32 or int64 (batch, anchors of all levels): class index, -1 for background, less for ignored.
        foreground: integers (batch,), the foreground anchors of each image.
        factor_at: float32 scalar that multiplies the gradient: the expected gradient of the loss in the forward, the
            real one in the backward.
        used_at: float32 scalar, written by the forward: the factor it used. If the backward finds its own factor there,
            the gradients are right already, and it does nothing.
        result_at: forward, float32 (programs,): the loss, in parts. Backward, float32 scalar: the factor, for the next
            forward to expect.
        anchors: of each level.
        level_strides: from image to image, in vectors of WIDTH logits.
        gradient_strides: likewise.
        target_stride: from image to image, in elements.
        batch: images.
        alpha: weight of the foreground class.
        gamma: exponent; not read if SQUARE.
        CLASSES: logits of an anchor.
        WIDTH: logits of a vector; it divides CLASSES, and a vector's bytes divide each row's address.
        VECTORS: of a tile, a power of two; ROWS anchors leave few of them unused.
        ROWS: anchors of a tile.
        ROWS_PADDED: the first power of two from ROWS on.
        SQUARE: gamma is 2.
        TERMS: of the series of log(1 + u) for small u: 0, 2 or 4.
        BACKWARD: which of the two this is.
        WITH_GRADIENT: gradients are wanted.
        IN_PLACE: they take the logits' place.
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
    tiles_before, anchors_before = 0, 0
    for i in range(len(levels)):
        of_level, level, level_stride = _pick(anchors, i), _pick(levels, i), _pick(level_strides, i)
        gradient, gradient_stride = _pick(gradients, i), _pick(gradient_strides, i)
        tiles = (of_level + ROWS - 1) // ROWS
        tiles_on, images_on = programs % tiles, programs // tiles
        # All levels' tiles are dealt out as if they stood in one row, so that no program gets two more than another.
        turn = (program + programs - tiles_before % programs) % programs
        tile, image = turn % tiles, turn // tiles
        while image < batch:
            first_row = tile * ROWS
            count = tl.minimum(of_level - first_row, ROWS)
            image_64 = image.to(tl.int64)
            targets_at = targets + image_64 * target_stride + (anchors_before + first_row)
            target_of_vector = tl.load(targets_at + row_of_vector, mask=row_of_vector < count, other=-2)
            target = tl.load(targets_at + rows, mask=rows < count, other=-2).to(tl.int32)
            logits_at = level + (image_64 * level_stride + first_row * vectors_of_row) * WIDTH
            gradients_at = gradient + (image_64 * gradient_stride + first_row * vectors_of_row) * WIDTH
            weight = 1.0 / (tl.maximum(tl.load(foreground + image).to(tl.int32), 1) * batch).to(tl.float32)
            has_foreground = tl.max(target) >= 0
            is_class = (target >= 0) & (target < CLASSES)
            own_class = rows * CLASSES + target
            if IN_PLACE:
                own = tl.zeros([ROWS_PADDED], tl.float32)
                if has_foreground:
                    own = tl.load(logits_at + own_class, mask=is_class, other=0).to(tl.float32)
                    tl.debug_barrier()  # other threads' gradients go where these logits are
            # Ignored anchors are not read: whatever is there, NaN too, has neither loss nor gradient.
            wanted = (target_of_vector >= -1)[:, None]
            logit = tl.load(logits_at + inside_tile, mask=wanted, other=float("-inf")).to(tl.float32)
            loss, slope = _background(logit, gamma, SQUARE, TERMS, PAIRED=True)
            if not BACKWARD:
                background_sum += tl.sum(loss, axis=1) * (weight * (1 - alpha) * LN2)
            if WITH_GRADIENT:
                slope = (slope * (weight * (1 - alpha) * factor)).to(gradient.dtype.element_ty)
                tl.store(gradients_at + inside_tile, slope, mask=(row_of_vector < count)[:, None])
            if has_foreground:
                if not IN_PLACE:
                    own = tl.load(logits_at + own_class, mask=is_class, other=0).to(tl.float32)
                # A thread may have one of these alone, and Triton would pair it with whatever is in a register.
                taken_as_background, _ = _background(own, gamma, SQUARE, TERMS, PAIRED=False)
                own_loss, own_slope = _background(-own, gamma, SQUARE, TERMS, PAIRED=False)
                if not BACKWARD:
                    correction = (own_loss * alpha - taken_as_background * (1 - alpha)) * (weight * LN2)
                    # A class that is none of the K must not pass for background, and nothing can be raised from here.
                    correction = tl.where(is_class, correction, float("nan"))
                    foreground_sum += tl.where(target >= 0, correction, 0.0)
                if WITH_GRADIENT:
                    own_slope = (own_slope * (-alpha * weight * factor)).to(gradient.dtype.element_ty)
                    tl.debug_barrier()  # these gradients go where other threads have just written theirs
                    tl.store(gradients_at + own_class, own_slope, mask=is_class)
            tile += tiles_on
            image += images_on
            if tile >= tiles:
                tile -= tiles
                image += 1
        tiles_before += tiles * batch
        anchors_before += of_level
    if not BACKWARD:
        tl.store(result_at + program, tl.sum(background_sum) + tl.sum(foreground_sum))


@triton.jit
def rescale_kernel(gradients, counts, factor_at, used_at, expected_at, BLOCK: tl.constexpr):
    """Multiply gradients, (counts[i],) each, by the factor over the one used; if that is 1, do nothing.

    `expected_at` is given the factor.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    factor, used = tl.load(factor_at), tl.load(used_at)
    if program == 0:
        tl.store(expected_at, factor)
    if factor == used:
        return
    ratio = factor / used
    for i in tl.static_range(len(gradients)):
        for start in range(program.to(tl.int64) * BLOCK, counts[i], programs * BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(gradients[i] + at, mask=at < counts[i]).to(tl.float32)
            tl.store(gradients[i] + at, (value * ratio).to(gradients[i].dtype.element_ty), mask=at < counts[i])


@triton.jit
def _pick(values, i):
    """Return the i-th of a tuple of scalars, for an `i` that only the device knows."""
    picked = values[0]
    for j in tl.static_range(1, len(values)):
        picked = tl.where(i == j, values[j], picked)
    return picked


@triton.jit
def _background(x, gamma, SQUARE: tl.constexpr, TERMS: tl.constexpr, PAIRED: tl.constexpr):
    """Return L(x) / ln 2 and its derivative sigmoid(x)^gamma (gamma (1 - sigmoid(x)) softplus(x) + sigmoid(x)).

    -inf gives zeros, inf gives inf, NaN gives NaN: a loss scaler has to see them. The derivative is right up to
    1e15. PAIRED if each thread has an even number of elements.
    """
    y = x * LOG2E
    u = _exp2(tl.minimum(y, HIGHEST_EXPONENT))
    complement = _reciprocal(1.0 + u, PAIRED)
    p = u * complement
    softplus = _log2(1.0 + u)
    # The approximate log2 is off by up to 2^-22 near 1, and 1 + u is rounded: too much for a small u.
    if TERMS == 2:
        softplus = tl.where(u < 0.0078125, u * (LOG2E - 0.5 * LOG2E * u), softplus)
    elif TERMS == 4:
        series = u * (LOG2E - u * (0.5 * LOG2E - u * (LOG2E / 3 - u * (LOG2E / 4))))
        softplus = tl.where(u < 0.0625, series, softplus)
    softplus = tl.maximum(y, softplus, propagate_nan=tl.PropagateNan.ALL)
    if SQUARE:
        power = p * p
        gamma = 2.0
    else:
        power = _exp2(gamma * tl.maximum(y - softplus, -1e30))
    return power * softplus, power * ((softplus * complement) * (gamma * LN2) + p)


@triton.jit
def _exp2(x):
    if INTERPRETED:
        y = tl.math.exp2(x)
    else:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def _log2(x):
    if INTERPRETED:
        y = tl.math.log2(x)
    else:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def _reciprocal(x, PAIRED: tl.constexpr):
    """Return 1 / x for x from 1 to 2^62: PAIRED, two at a time, 1 / a = b (1 / (a b)), since multiplying is cheaper."""
    if INTERPRETED:
        y = 1.0 / x
    elif not PAIRED:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.inline_asm_elementwise(
            "{ .reg .f32 r; mul.ftz.f32 r, $2, $3; rcp.approx.ftz.f32 r, r;"
            " mul.ftz.f32 $0, r, $3; mul.ftz.f32 $1, r, $2; }",
            "=&f,=&f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    return y
