# mypy: ignore-errors
"""The Triton kernel that casts a matrix to FP8: rows, transposed rows, column sums and the next scale in one pass.

Hopper's FP8 products read both operands along the sum (K-major), so the matrices of a forward product are wanted
transposed in the backward.
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
    source, before, out, turned, sums, state, inverse, rows, columns, source_stride, out_stride, turned_stride,
    largest, decay, WORK: tl.constexpr, FORM: tl.constexpr, BOUND: tl.constexpr, LIMIT: tl.constexpr,
    MANTISSA: tl.constexpr, LEAST: tl.constexpr, OUT: tl.constexpr, TURNED: tl.constexpr, SUMS: tl.constexpr,
    NOTES: tl.constexpr, ROLLS: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write values * scale, rounded, and note the largest magnitude.

    Program (i, j) goes through every num_programs(0)-th tile of the j-th block of columns.

    Args:
        source: (rows, columns) with a unit stride along rows.
        before: for GELU_BACKWARD what went into GELU, dense; source is then the gradient of what came out.
        out, turned: FP8, (rows, columns) and (columns, rows).
        sums: float32 (num_programs(0), columns), of each program's values.
        state: int32 (3,), see `scaling.Scales`.
        inverse: float32 (), written: 1 / scale.
        largest: what the magnitude in `state` becomes.
        decay: see `scaling.Scaling`.
        WORK: what the values are: source, gelu(source), or source * gelu'(before).
        LIMIT: the format's largest number.
        MANTISSA, LEAST: bits of the format's mantissa, and exponent of its smallest normal number.
        NOTES: whether the largest magnitude is noted.
        ROLLS: whether the program that is done last makes the next scale of what was seen.
        EVEN: whether the tiles fill the matrix.
    """
    strip, stride = tl.program_id(0), tl.num_programs(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    used = tl.maximum(tl.load(state).to(tl.float32, bitcast=True), SMALLEST)
    scale = largest / used
    if strip + tl.program_id(1) == 0:
        tl.store(inverse, used / largest)
    # Each thread has sums and largest magnitudes of its own; they are put together at the end.
    most = tl.zeros([ROWS, COLUMNS], tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    in_tile = tl.arange(0, ROWS)
    for tile in range(strip, tl.cdiv(rows, ROWS), stride):
        first = tile * ROWS
        if EVEN:
            there = None
        else:
            there = (first + in_tile < rows)[:, None] & (column < columns)[None, :]
        at = first.to(tl.int64) * source_stride + (in_tile[:, None] * source_stride + column[None, :])
        x = _loaded(source + at, there).to(tl.float32)
        if WORK == GELU:
            x, _ = gelu_and_slope(x, FORM, BOUND)
        if WORK == GELU_BACKWARD:
            at = first.to(tl.int64) * columns + (in_tile[:, None] * columns + column[None, :])
            _, slope = gelu_and_slope(_loaded(before + at, there).to(tl.float32), FORM, BOUND)
            x = x * slope
        size = tl.abs(x)
        finite = size < float("inf")
        if NOTES:
            most = tl.maximum(most, tl.where(finite, size, 0.0))
        if SUMS:
            total += x
        if OUT or TURNED:
            scaled = tl.minimum(tl.maximum(x * scale, -LIMIT), LIMIT)
            # An overflow stays one, for a loss scaler to see.
            scaled = tl.where(finite, scaled, float("nan"))
            if INTERPRETED:
                scaled = _rounded(scaled, MANTISSA, LEAST)
            small = scaled.to(out.dtype.element_ty if OUT else turned.dtype.element_ty)
            if OUT:
                at = first.to(tl.int64) * out_stride + (in_tile[:, None] * out_stride + column[None, :])
                tl.store(out + at, small, mask=there)
            if TURNED:
                at = column.to(tl.int64)[:, None] * turned_stride + (first + in_tile)[None, :]
                tl.store(turned + at, tl.trans(small), mask=None if EVEN else tl.trans(there))
    if SUMS:
        tl.store(sums + strip * columns + column, tl.sum(total, axis=0), mask=column < columns)
    if NOTES:
        tl.atomic_max(state + 1, tl.max(tl.max(most, axis=1), axis=0).to(tl.int32, bitcast=True))
    if ROLLS:
        done = tl.atomic_add(state + 2, 1)
        if done == stride * tl.num_programs(1) - 1:
            seen = tl.atomic_xchg(state + 1, 0).to(tl.float32, bitcast=True)
            now = tl.load(state).to(tl.float32, bitcast=True)
            tl.store(state, tl.maximum(seen, now * decay).to(tl.int32, bitcast=True))
            tl.store(state + 2, 0)


@triton.jit
def _loaded(at, there):
    if there is None:
        values = tl.load(at)
    else:
        values = tl.load(at, mask=there, other=0.0)
    return values


@triton.jit
def _rounded(x, MANTISSA: tl.constexpr, LEAST: tl.constexpr):
    # A GPU rounds to nearest where the interpreter cuts off.
    exponent = tl.maximum(((x.to(tl.int32, bitcast=True) >> 23) & 255) - 127, LEAST)
    unit = tl.exp2((exponent - MANTISSA).to(tl.float32))
    whole = (x / unit + 12582912.0) - 12582912.0
    return whole * unit
