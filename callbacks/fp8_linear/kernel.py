# mypy: ignore-errors
"""The Triton kernel that casts a matrix to FP8: rows, transposed rows, column sums and the next scale in one pass.

Hopper's FP8 products read both operands along the sum (K-major), so the matrices of a forward product are wanted
transposed in the backward. A thread has four rows of its columns, whose four numbers of 8 bits are one word of 32:
words are transposed between threads, where bytes would be moved one by one.
"""

import triton
import triton.language as tl

from fasttrain.callbacks.gemm_gelu.gelu_kernel import gelu_and_slope

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # as decided when this module is imported
PLAIN = tl.constexpr(0)
GELU = tl.constexpr(1)
GELU_BACKWARD = tl.constexpr(2)
SMALLEST = tl.constexpr(1e-30)  # as `scaling.SMALLEST`


@triton.jit
def cast_kernel(
    source, before, out, words, sums, state, inverse, rows, columns, source_stride, out_stride, words_stride, largest,
    decay, WORK: tl.constexpr, FORM: tl.constexpr, BOUND: tl.constexpr, E4M3: tl.constexpr, OUT: tl.constexpr,
    TURNED: tl.constexpr, SUMS: tl.constexpr, NOTES: tl.constexpr, ROLLS: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write values * scale, rounded, and note the largest magnitude.

    Program (i, j) goes through every num_programs(0)-th tile, of 4 * ROWS rows, of the j-th block of columns.

    Args:
        source: (rows, columns) with a unit stride along rows; rows is a multiple of 4.
        before: for GELU_BACKWARD what went into GELU, dense; source is then the gradient of what came out.
        out: FP8 (rows, columns).
        words: int32 (columns, rows / 4), of four FP8 numbers each.
        sums: float32 (num_programs(0), columns), of each program's values.
        state: int32 (3,), see `scaling.Scales`.
        inverse: float32 (), written: 1 / scale.
        largest: what the magnitude in `state` becomes.
        decay: see `scaling.Scaling`.
        WORK: what the values are: source, gelu(source), or source * gelu'(before).
        E4M3: the format; else E5M2.
        NOTES: whether the largest magnitude is noted.
        ROLLS: whether the program that is done last makes the next scale of what was seen.
        EVEN: whether the tiles fill the matrix.
    """
    strip, strips = tl.program_id(0), tl.num_programs(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    used = tl.maximum(tl.load(state).to(tl.float32, bitcast=True), SMALLEST)
    scale = tl.div_rn(largest, used)
    if strip + tl.program_id(1) == 0:
        tl.store(inverse, tl.div_rn(used, largest))
    # Each thread has sums and largest magnitudes of its own; they are put together at the end.
    most = tl.zeros([ROWS, COLUMNS], tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    quad = tl.arange(0, ROWS)
    for tile in range(strip, tl.cdiv(rows, 4 * ROWS), strips):
        first = tile * ROWS
        there = None if EVEN else (first + quad < rows // 4)[:, None] & (column < columns)[None, :]
        at = (first * 4).to(tl.int64) * source_stride + (quad[:, None] * 4 * source_stride + column[None, :])
        at_before = (first * 4).to(tl.int64) * columns + (quad[:, None] * 4 * columns + column[None, :])
        a = _values(source + at, before + at_before, there, WORK, FORM, BOUND)
        b = _values(source + at + source_stride, before + at_before + columns, there, WORK, FORM, BOUND)
        c = _values(source + at + 2 * source_stride, before + at_before + 2 * columns, there, WORK, FORM, BOUND)
        d = _values(source + at + 3 * source_stride, before + at_before + 3 * columns, there, WORK, FORM, BOUND)
        if NOTES:
            largest_of_four = tl.maximum(tl.maximum(_size(a), _size(b)), tl.maximum(_size(c), _size(d)))
            most = tl.maximum(most, largest_of_four)
        if SUMS:
            total += (a + b) + (c + d)
        if OUT or TURNED:
            a, b = _scaled(a, scale, E4M3), _scaled(b, scale, E4M3)
            c, d = _scaled(c, scale, E4M3), _scaled(d, scale, E4M3)
        if OUT:
            at = (first * 4).to(tl.int64) * out_stride + (quad[:, None] * 4 * out_stride + column[None, :])
            tl.store(out + at, a.to(out.dtype.element_ty), mask=there)
            tl.store(out + at + out_stride, b.to(out.dtype.element_ty), mask=there)
            tl.store(out + at + 2 * out_stride, c.to(out.dtype.element_ty), mask=there)
            tl.store(out + at + 3 * out_stride, d.to(out.dtype.element_ty), mask=there)
        if TURNED:
            at = column.to(tl.int64)[:, None] * words_stride + (first + quad)[None, :]
            tl.store(words + at, tl.trans(_word(a, b, c, d, E4M3)), mask=None if EVEN else tl.trans(there))
    if SUMS:
        tl.store(sums + strip * columns + column, tl.sum(total, axis=0), mask=column < columns)
    if NOTES:
        tl.atomic_max(state + 1, tl.max(tl.max(most, axis=1), axis=0).to(tl.int32, bitcast=True))
    if ROLLS:
        done = tl.atomic_add(state + 2, 1)
        if done == strips * tl.num_programs(1) - 1:
            seen = tl.atomic_xchg(state + 1, 0).to(tl.float32, bitcast=True)
            now = tl.load(state).to(tl.float32, bitcast=True)
            tl.store(state, tl.maximum(seen, now * decay).to(tl.int32, bitcast=True))
            tl.store(state + 2, 0)


@triton.jit
def _values(at, before, there, WORK: tl.constexpr, FORM: tl.constexpr, BOUND: tl.constexpr):
    x = (tl.load(at) if there is None else tl.load(at, mask=there, other=0.0)).to(tl.float32)
    if WORK == GELU:
        x, _ = gelu_and_slope(x, FORM, BOUND)
    if WORK == GELU_BACKWARD:
        p = (tl.load(before) if there is None else tl.load(before, mask=there, other=0.0)).to(tl.float32)
        _, slope = gelu_and_slope(p, FORM, BOUND)
        x = x * slope
    return x


@triton.jit
def _size(x):
    # Of finite numbers: one overflow is not to decide about the scale.
    size = tl.abs(x)
    return tl.where(size < float("inf"), size, 0.0)


@triton.jit
def _scaled(x, scale, E4M3: tl.constexpr):
    LIMIT: tl.constexpr = 448.0 if E4M3 else 57344.0
    scaled = tl.minimum(tl.maximum(x * scale, -LIMIT), LIMIT)
    # An overflow stays one, for a loss scaler to see.
    scaled = tl.where(tl.abs(x) < float("inf"), scaled, float("nan"))
    return _rounded(scaled, E4M3) if INTERPRETED else scaled


@triton.jit
def _word(a, b, c, d, E4M3: tl.constexpr):
    if INTERPRETED:
        word = _bits(a, E4M3) | (_bits(b, E4M3) << 8) | (_bits(c, E4M3) << 16) | (_bits(d, E4M3) << 24)
    elif E4M3:
        word = tl.inline_asm_elementwise(
            "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; "
            "mov.b32 $0, {lo, hi}; }", "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        word = tl.inline_asm_elementwise(
            "{ .reg .b16 lo, hi; cvt.rn.satfinite.e5m2x2.f32 lo, $2, $1; cvt.rn.satfinite.e5m2x2.f32 hi, $4, $3; "
            "mov.b32 $0, {lo, hi}; }", "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return word


@triton.jit
def _bits(x, E4M3: tl.constexpr):
    return x.to(tl.float8e4nv if E4M3 else tl.float8e5).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def _rounded(x, E4M3: tl.constexpr):
    # A GPU rounds to nearest where the interpreter cuts off.
    MANTISSA: tl.constexpr = 3 if E4M3 else 2
    LEAST: tl.constexpr = -6 if E4M3 else -14  # exponent of the smallest normal number
    exponent = tl.maximum(((x.to(tl.int32, bitcast=True) >> 23) & 255) - 127, LEAST)
    unit = tl.exp2((exponent - MANTISSA).to(tl.float32))
    whole = (x / unit + 12582912.0) - 12582912.0
    return whole * unit
