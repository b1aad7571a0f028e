# mypy: ignore-errors
"""What the Triton kernels of LAMB and LARS share: chunks of many tensors, found by a table of addresses.

A program takes one chunk of one tensor. Whole blocks of it are read and written without a mask, which is what lets a
thread move 16 bytes at once; only the last block of a tensor has one.

Tables, all int64:
    layout: the number of chunks before each tensor and after the last (tensors + 1), elements of each (tensors), and
        the tensor of each chunk.
    addresses: a row of `tensors` for each list.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # as decided when this module is imported


@triton.jit
def chunk_of(layout_at, tensors, CHUNK: tl.constexpr):
    """Return this program's tensor, the index of its first element there, and how many elements it has."""
    chunk = tl.program_id(0)
    tensor = tl.load(layout_at + 2 * tensors + 1 + chunk)
    start = (chunk - tl.load(layout_at + tensor)) * CHUNK
    size = tl.load(layout_at + tensors + 1 + tensor)
    return tensor, start, tl.minimum(size - start, CHUNK).to(tl.int32)


@triton.jit
def pointer_to(addresses_at, index, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the pointer with this index in a table, to elements of DTYPE, at a multiple of 16 bytes if ALIGNED."""
    pointer = tl.load(addresses_at + index).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def read(pointer, at, count, MASKED: tl.constexpr):
    """Return a block of elements in float32, 0 from `count` on."""
    value = tl.load(pointer + at, mask=at < count, other=0) if MASKED else tl.load(pointer + at)
    return value.to(tl.float32)


@triton.jit
def write(pointer, at, count, value, MASKED: tl.constexpr):
    """Store a block, rounded to what the pointer points to."""
    value = value.to(pointer.dtype.element_ty)
    if MASKED:
        tl.store(pointer + at, value, mask=at < count)
    else:
        tl.store(pointer + at, value)


@triton.jit
def existing(value, at, count, MASKED: tl.constexpr):
    """Return a computed block with 0 from `count` on, where eps of 0 has made 0 / 0."""
    if MASKED:
        value = tl.where(at < count, value, 0.0)
    return value


@triton.jit
def sum_of_parts(parts_at, first, last, BLOCK: tl.constexpr):
    """Return the sum of parts[first:last], in float64 and always in the same order."""
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for at in range(first, last, BLOCK):
        index = at + tl.arange(0, BLOCK)
        total += tl.load(parts_at + index, mask=index < last, other=0).to(tl.float64)
    return tl.sum(total)


@triton.jit(do_not_specialize=["tensors"])
def squares_kernel(
    layout_at, addresses_at, parts_at, tensors,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sum of the squares of each chunk.

    Args:
        layout_at: see above.
        addresses_at: one row.
        parts_at: float32 (chunks,).
        tensors: how many.
        DTYPE: of the tensors.
        ALIGNED: whether all addresses are multiples of 16 bytes.
        CHUNK: elements of a chunk, a multiple of BLOCK.
        BLOCK: elements at once, a power of two.
    """
    tensor, start, count = chunk_of(layout_at, tensors, CHUNK)
    pointer = pointer_to(addresses_at, tensor, DTYPE, ALIGNED) + start
    whole = count // BLOCK * BLOCK
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for begin in range(0, whole, BLOCK):
        value = read(pointer, begin + tl.arange(0, BLOCK), count, False)
        total += value * value
    if whole < count:
        value = read(pointer, whole + tl.arange(0, BLOCK), count, True)
        total += value * value
    tl.store(parts_at + tl.program_id(0), tl.sum(total))
