# mypy: ignore-errors
"""LARS's Triton kernels: each tensor's trust, and the update. All in float32 but sums of parts and trust."""

import triton
import triton.language as tl

from fasttrain.callbacks.optimizers.kernel import chunk_of, pointer_to, read, sum_of_parts, write

# Rows of the addresses.
WEIGHTS = tl.constexpr(0)
PARAMS = tl.constexpr(1)  # that master weights are rounded to, else the weights again
BUFFERS = tl.constexpr(2)
# A tensor's row of factors, float32.
FACTORS = tl.constexpr(4)
BEFORE = tl.constexpr(0)  # of the decayed gradient before the momentum
MOMENTUM = tl.constexpr(1)
AFTER = tl.constexpr(2)  # of what the weights descend along
DECAY = tl.constexpr(3)


@triton.jit(do_not_specialize=["tensors", "chunks"])
def trust_kernel(
    layout_at, factors_at, weights_at, grads_at, lr_at, momentum_at, decay_at, trust_at, eps_at, tensors, chunks,
    ADAPTS: tl.constexpr, LR_INSIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a tensor's factors.

    Args:
        layout_at: see `kernel`.
        factors_at: (tensors, FACTORS).
        weights_at, grads_at: float32 (chunks,), the squares of weights and gradients if ADAPTS.
        lr_at, momentum_at, decay_at, trust_at, eps_at: one number each, of any dtype.
        tensors: how many; a program takes one.
        chunks: how many.
        ADAPTS: scale the rate by trust, where weights and gradient are not 0.
        LR_INSIDE: whether the rate is in the momentum.
        BLOCK: parts at once, a power of two.
    """
    tensor = tl.program_id(0)
    lr, decay = tl.load(lr_at).to(tl.float64), tl.load(decay_at).to(tl.float64)
    trust = tl.full((), 1.0, tl.float64)
    if ADAPTS:
        first, last = tl.load(layout_at + tensor).to(tl.int32), tl.load(layout_at + tensor + 1).to(tl.int32)
        weights = tl.sqrt(sum_of_parts(weights_at, first, last, BLOCK))
        grads = tl.sqrt(sum_of_parts(grads_at, first, last, BLOCK))
        both = (weights > 0) & (grads > 0)
        below = grads + decay * weights + tl.load(eps_at).to(tl.float64)
        trust = tl.where(both, tl.load(trust_at).to(tl.float64) * weights / tl.where(both, below, 1.0), 1.0)
    before, after = trust, lr
    if LR_INSIDE:
        before, after = trust * lr, tl.full((), 1.0, tl.float64)
    at = factors_at + tensor * FACTORS
    tl.store(at + BEFORE, before.to(tl.float32))
    tl.store(at + MOMENTUM, tl.load(momentum_at).to(tl.float32))
    tl.store(at + AFTER, after.to(tl.float32))
    tl.store(at + DECAY, decay.to(tl.float32))


@triton.jit(do_not_specialize=["tensors"])
def update_kernel(
    layout_at, addresses_at, grads_at, factors_at, tensors,
    WEIGHT: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr, ALIGNED: tl.constexpr, BUFFERED: tl.constexpr,
    NESTEROV: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update the momentum buffers and the weights.

    Args:
        layout_at, addresses_at: see `kernel`.
        grads_at: int64 (tensors,), addresses.
        factors_at: (tensors, FACTORS).
        tensors: how many.
        WEIGHT: dtype of what is updated.
        PARAM: what that is rounded to, elsewhere if it differs.
        GRAD: dtype of the gradients.
        ALIGNED: whether all addresses are multiples of 16 bytes.
        BUFFERED: whether there are buffers.
        NESTEROV: descend along the gradient plus the momentum.
        CHUNK: elements of a chunk, a multiple of BLOCK.
        BLOCK: elements at once, a power of two.
    """
    tensor, start, count = chunk_of(layout_at, tensors, CHUNK)
    weight_at = pointer_to(addresses_at, WEIGHTS * tensors + tensor, WEIGHT, ALIGNED) + start
    param_at = pointer_to(addresses_at, PARAMS * tensors + tensor, PARAM, ALIGNED) + start
    grad_at = pointer_to(grads_at, tensor, GRAD, ALIGNED) + start
    buffer_at = weight_at
    if BUFFERED:
        buffer_at = pointer_to(addresses_at, BUFFERS * tensors + tensor, tl.float32, ALIGNED) + start
    row_at = factors_at + tensor * FACTORS
    before, momentum = tl.load(row_at + BEFORE), tl.load(row_at + MOMENTUM)
    after, decay = tl.load(row_at + AFTER), tl.load(row_at + DECAY)
    whole = count // BLOCK * BLOCK
    for begin in range(0, whole, BLOCK):
        _update(
            weight_at, param_at, grad_at, buffer_at, before, momentum, after, decay, begin + tl.arange(0, BLOCK), count,
            WEIGHT != PARAM, BUFFERED, NESTEROV, False,
        )  # fmt: skip
    if whole < count:
        _update(
            weight_at, param_at, grad_at, buffer_at, before, momentum, after, decay, whole + tl.arange(0, BLOCK), count,
            WEIGHT != PARAM, BUFFERED, NESTEROV, True,
        )  # fmt: skip


@triton.jit
def _update(
    weight_at, param_at, grad_at, buffer_at, before, momentum, after, decay, at, count,
    ROUNDS: tl.constexpr, BUFFERED: tl.constexpr, NESTEROV: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    weight = read(weight_at, at, count, MASKED)
    direction = before * (read(grad_at, at, count, MASKED) + decay * weight)
    if BUFFERED:
        buffer = momentum * read(buffer_at, at, count, MASKED) + direction
        write(buffer_at, at, count, buffer, MASKED)
        if NESTEROV:
            direction += momentum * buffer
        else:
            direction = buffer
    weight -= after * direction
    write(weight_at, at, count, weight, MASKED)
    if ROUNDS:
        write(param_at, at, count, weight, MASKED)
