# mypy: ignore-errors
"""LAMB's Triton kernels: what each tensor is multiplied by, moments, trust ratios, weights.

All in float32 but sums of parts and corrections, which are in float64. The update's direction is a function of weight
and moments, and is computed again where the weights are written: that reads the second moment once more where keeping
the direction would write it once more, the same bytes, and needs no memory.
"""

import triton
import triton.language as tl

from fasttrain.callbacks.optimizers.kernel import chunk_of, existing, pointer_to, read, sum_of_parts, write

# Rows of the addresses.
WEIGHTS = tl.constexpr(0)
PARAMS = tl.constexpr(1)  # that master weights are rounded to, else the weights again
FIRST = tl.constexpr(2)
SECOND = tl.constexpr(3)
STEPS = tl.constexpr(4)
# A tensor's row of factors, float32.
FACTORS = tl.constexpr(16)
CLIP = tl.constexpr(0)  # of the gradient
BETA1 = tl.constexpr(1)
SHARE1 = tl.constexpr(2)  # of the gradient in the first moment
BETA2 = tl.constexpr(3)
SHARE2 = tl.constexpr(4)
SCALE = tl.constexpr(5)  # of first / (root of second + EPS): both bias corrections
EPS = tl.constexpr(6)
DECAY = tl.constexpr(7)
LR = tl.constexpr(8)
RATE = tl.constexpr(9)  # that times the ratio
# How weights decay.
NONE = tl.constexpr(0)
DECOUPLED = tl.constexpr(1)
L2 = tl.constexpr(2)


@triton.jit(do_not_specialize=["tensors"])
def prepare_kernel(
    addresses_at, factors_at, norm_at, most_at, lr_at, beta1_at, beta2_at, eps_at, decay_at, tensors,
    CLIPPED: tl.constexpr, DECAYS: tl.constexpr, CORRECTED: tl.constexpr, AVERAGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count a step of each tensor, and write its factors.

    Args:
        addresses_at: int64 (5, tensors).
        factors_at: (tensors, FACTORS).
        norm_at: of all gradients together, float64.
        most_at: what it is clipped to.
        lr_at, beta1_at, beta2_at, eps_at, decay_at: one number each, of any dtype.
        tensors: how many.
        CLIPPED: clip at all.
        DECAYS: whether `decay_at` is looked at.
        CORRECTED: correct the moments' bias.
        AVERAGED: weigh the gradient by 1 - beta1.
        BLOCK: tensors of a program.
    """
    tensor = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = tensor < tensors
    at = factors_at + tensor * FACTORS
    steps_at = tl.load(addresses_at + STEPS * tensors + tensor, mask=exists, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(steps_at, mask=exists, other=0) + 1
    tl.store(steps_at, step, mask=exists)
    beta1, beta2 = tl.load(beta1_at).to(tl.float64), tl.load(beta2_at).to(tl.float64)
    eps = tl.load(eps_at).to(tl.float64)
    tl.store(at + BETA1, beta1.to(tl.float32), mask=exists)
    tl.store(at + BETA2, beta2.to(tl.float32), mask=exists)
    tl.store(at + SHARE2, (1.0 - beta2).to(tl.float32), mask=exists)
    share1 = 1.0
    if AVERAGED:
        share1 = (1.0 - beta1).to(tl.float32)
    tl.store(at + SHARE1, share1, mask=exists)
    if CORRECTED:
        # Numerator and denominator times the root of the second correction.
        root = tl.sqrt(1.0 - _power(beta2, step))
        tl.store(at + SCALE, (root / (1.0 - _power(beta1, step))).to(tl.float32), mask=exists)
        tl.store(at + EPS, (eps * root).to(tl.float32), mask=exists)
    else:
        tl.store(at + SCALE, 1.0, mask=exists)
        tl.store(at + EPS, eps.to(tl.float32), mask=exists)
    clip = 1.0
    if CLIPPED:
        excess = tl.load(norm_at) / tl.load(most_at).to(tl.float64)
        clip = (1.0 / tl.where(excess > 1.0, excess, 1.0)).to(tl.float32)
    tl.store(at + CLIP, clip, mask=exists)
    decay = 0.0
    if DECAYS:
        decay = tl.load(decay_at).to(tl.float32)
    tl.store(at + DECAY, decay, mask=exists)
    lr = tl.load(lr_at).to(tl.float32)
    tl.store(at + LR, lr, mask=exists)
    tl.store(at + RATE, lr, mask=exists)


@triton.jit(do_not_specialize=["tensors"])
def moments_kernel(
    layout_at, addresses_at, grads_at, factors_at, parts_at, updates_at, tensors,
    WEIGHT: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr, ALIGNED: tl.constexpr, DECAYS: tl.constexpr,
    ADAPTS: tl.constexpr, KEEPS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update the moments; then the weights, or the parts of the norms that their update waits for.

    Args:
        layout_at, addresses_at: see `kernel`.
        grads_at: int64 (tensors,), addresses.
        factors_at: (tensors, FACTORS).
        parts_at: float32 (2, chunks), the squares of weights and updates if ADAPTS.
        updates_at: float32 (chunks, CHUNK), if KEEPS.
        tensors: how many.
        WEIGHT: dtype of what is updated.
        PARAM: what that is rounded to, elsewhere if it differs.
        GRAD: dtype of the gradients.
        ALIGNED: whether all addresses are multiples of 16 bytes.
        DECAYS: NONE, DECOUPLED or L2.
        ADAPTS: leave the weights to `apply_kernel`.
        KEEPS: leave the update to it too.
        CHUNK: elements of a chunk, a multiple of BLOCK.
        BLOCK: elements at once, a power of two.
    """
    tensor, start, count = chunk_of(layout_at, tensors, CHUNK)
    weight_at = pointer_to(addresses_at, WEIGHTS * tensors + tensor, WEIGHT, ALIGNED) + start
    param_at = pointer_to(addresses_at, PARAMS * tensors + tensor, PARAM, ALIGNED) + start
    first_at = pointer_to(addresses_at, FIRST * tensors + tensor, tl.float32, ALIGNED) + start
    second_at = pointer_to(addresses_at, SECOND * tensors + tensor, tl.float32, ALIGNED) + start
    grad_at = pointer_to(grads_at, tensor, GRAD, ALIGNED) + start
    factors = _factors(factors_at + tensor * FACTORS)
    kept_at = updates_at + tl.program_id(0).to(tl.int64) * CHUNK
    whole = count // BLOCK * BLOCK
    weights = tl.zeros((BLOCK,), dtype=tl.float32)
    updates = tl.zeros((BLOCK,), dtype=tl.float32)
    for begin in range(0, whole, BLOCK):
        weight, update = _moments(
            weight_at, param_at, grad_at, first_at, second_at, kept_at, factors, begin + tl.arange(0, BLOCK), count,
            WEIGHT != PARAM, DECAYS, ADAPTS, KEEPS, False,
        )  # fmt: skip
        weights += weight * weight
        updates += update * update
    if whole < count:
        weight, update = _moments(
            weight_at, param_at, grad_at, first_at, second_at, kept_at, factors, whole + tl.arange(0, BLOCK), count,
            WEIGHT != PARAM, DECAYS, ADAPTS, KEEPS, True,
        )  # fmt: skip
        weights += weight * weight
        updates += update * update
    if ADAPTS:
        tl.store(parts_at + tl.program_id(0), tl.sum(weights))
        tl.store(parts_at + tl.num_programs(0) + tl.program_id(0), tl.sum(updates))


@triton.jit(do_not_specialize=["tensors", "chunks"])
def ratio_kernel(layout_at, factors_at, parts_at, tensors, chunks, BLOCK: tl.constexpr):
    """Write a tensor's rate times the norm of its weights over that of its update, where neither is 0.

    Args:
        layout_at: see `kernel`.
        factors_at: (tensors, FACTORS).
        parts_at: float32 (2, chunks), of the norms' squares.
        tensors: how many; a program takes one.
        chunks: how many.
        BLOCK: parts at once, a power of two.
    """
    tensor = tl.program_id(0)
    first, last = tl.load(layout_at + tensor).to(tl.int32), tl.load(layout_at + tensor + 1).to(tl.int32)
    weights = tl.sqrt(sum_of_parts(parts_at, first, last, BLOCK))
    updates = tl.sqrt(sum_of_parts(parts_at + chunks, first, last, BLOCK))
    both = (weights > 0) & (updates > 0)
    ratio = tl.where(both, weights / tl.where(both, updates, 1.0), 1.0).to(tl.float32)
    at = factors_at + tensor * FACTORS
    tl.store(at + RATE, tl.load(at + LR) * ratio)


@triton.jit(do_not_specialize=["tensors"])
def apply_kernel(
    layout_at, addresses_at, factors_at, updates_at, tensors,
    WEIGHT: tl.constexpr, PARAM: tl.constexpr, ALIGNED: tl.constexpr, DECAYS: tl.constexpr, KEEPS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update the weights, with each tensor's own rate; arguments as those of `moments_kernel`."""
    tensor, start, count = chunk_of(layout_at, tensors, CHUNK)
    weight_at = pointer_to(addresses_at, WEIGHTS * tensors + tensor, WEIGHT, ALIGNED) + start
    param_at = pointer_to(addresses_at, PARAMS * tensors + tensor, PARAM, ALIGNED) + start
    first_at = pointer_to(addresses_at, FIRST * tensors + tensor, tl.float32, ALIGNED) + start
    second_at = pointer_to(addresses_at, SECOND * tensors + tensor, tl.float32, ALIGNED) + start
    factors = _factors(factors_at + tensor * FACTORS)
    kept_at = updates_at + tl.program_id(0).to(tl.int64) * CHUNK
    whole = count // BLOCK * BLOCK
    for begin in range(0, whole, BLOCK):
        _apply(
            weight_at, param_at, first_at, second_at, kept_at, factors, begin + tl.arange(0, BLOCK), count,
            WEIGHT != PARAM, DECAYS, KEEPS, False,
        )  # fmt: skip
    if whole < count:
        _apply(
            weight_at, param_at, first_at, second_at, kept_at, factors, whole + tl.arange(0, BLOCK), count,
            WEIGHT != PARAM, DECAYS, KEEPS, True,
        )  # fmt: skip


@triton.jit
def _factors(row_at):
    """Return a row as scalars, in the order of their indices."""
    return (
        tl.load(row_at + CLIP), tl.load(row_at + BETA1), tl.load(row_at + SHARE1), tl.load(row_at + BETA2),
        tl.load(row_at + SHARE2), tl.load(row_at + SCALE), tl.load(row_at + EPS), tl.load(row_at + DECAY),
        tl.load(row_at + LR), tl.load(row_at + RATE),
    )  # fmt: skip


@triton.jit
def _moments(
    weight_at, param_at, grad_at, first_at, second_at, kept_at, factors, at, count,
    ROUNDS: tl.constexpr, DECAYS: tl.constexpr, ADAPTS: tl.constexpr, KEEPS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    grad = read(grad_at, at, count, MASKED) * factors[CLIP]
    weight = read(weight_at, at, count, MASKED)
    if DECAYS == L2:
        grad += factors[DECAY] * weight
    first = factors[BETA1] * read(first_at, at, count, MASKED) + factors[SHARE1] * grad
    second = factors[BETA2] * read(second_at, at, count, MASKED) + factors[SHARE2] * grad * grad
    write(first_at, at, count, first, MASKED)
    write(second_at, at, count, second, MASKED)
    update = existing(_direction(weight, first, second, factors, DECAYS), at, count, MASKED)
    if not ADAPTS:
        _move(weight_at, param_at, weight, update, factors, at, count, ROUNDS, MASKED)
    elif KEEPS:
        write(kept_at, at, count, update, MASKED)
    return weight, update


@triton.jit
def _apply(
    weight_at, param_at, first_at, second_at, kept_at, factors, at, count,
    ROUNDS: tl.constexpr, DECAYS: tl.constexpr, KEEPS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    weight = read(weight_at, at, count, MASKED)
    if KEEPS:
        update = read(kept_at, at, count, MASKED)
    else:
        first, second = read(first_at, at, count, MASKED), read(second_at, at, count, MASKED)
        update = _direction(weight, first, second, factors, DECAYS)
    _move(weight_at, param_at, weight, update, factors, at, count, ROUNDS, MASKED)


@triton.jit
def _direction(weight, first, second, factors, DECAYS: tl.constexpr):
    update = tl.div_rn(first, tl.sqrt_rn(second) + factors[EPS]) * factors[SCALE]
    if DECAYS == DECOUPLED:
        update += factors[DECAY] * weight
    return update


@triton.jit
def _move(weight_at, param_at, weight, update, factors, at, count, ROUNDS: tl.constexpr, MASKED: tl.constexpr):
    weight -= factors[RATE] * update
    write(weight_at, at, count, weight, MASKED)
    if ROUNDS:
        write(param_at, at, count, weight, MASKED)


@triton.jit
def _power(beta, step):
    return tl.exp(step.to(tl.float64) * tl.log(tl.maximum(beta, 1e-300)))
