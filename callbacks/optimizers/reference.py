"""The papers' formulas, one parameter at a time, in the dtype of what they are given: the obvious version.

LAMB: arXiv 1904.00962, algorithm 2, with the options of NVIDIA/apex (csrc/multi_tensor_lamb.cu).
LARS: arXiv 1708.03888, algorithm 1, and the form of torch.optim.SGD.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

TOLERANCE = {
    # Of a parameter after 50 steps, relative to its largest value, against this reference in float64.
    torch.float64: 1e-12,  # some ten roundings of 1e-16 a step
    torch.float32: 2e-5,  # of 6e-8, and those of the norms
    torch.float16: 2e-2,  # one rounding of the parameter a step, 5e-4; none with master weights until the last
    torch.bfloat16: 2e-1,  # 4e-3
}


def clip_divisor(grads: Iterable[Tensor], max_norm: float | None) -> float:
    """Return what LAMB divides all gradients by: their norm together over `max_norm`, at least 1."""
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))
    return 1.0 if max_norm is None or not norm > max_norm else norm / max_norm


def lamb(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    divisor: float = 1.0,
    bias_correction: bool = True,
    grad_averaging: bool = True,
    adam_w_mode: bool = True,
    use_nvlamb: bool = False,
    adapt: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return weight, first and second moment after step number `step`, which is 1 for the first."""
    beta1, beta2 = betas
    grad = grad / divisor
    if not adam_w_mode:
        grad = grad + weight_decay * weight
    m = beta1 * exp_avg + (1 - beta1 if grad_averaging else 1) * grad
    v = beta2 * exp_avg_sq + (1 - beta2) * grad**2
    m_hat = m / (1 - beta1**step) if bias_correction else m
    v_hat = v / (1 - beta2**step) if bias_correction else v
    update = m_hat / (v_hat.sqrt() + eps)
    if adam_w_mode:
        update = update + weight_decay * weight
    ratio = 1.0
    if adapt and (use_nvlamb or weight_decay != 0) and weight.norm() > 0 and update.norm() > 0:
        ratio = float(weight.norm() / update.norm())
    return weight - lr * ratio * update, m, v


def lars(
    weight: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    trust_coefficient: float = 0.001,
    eps: float = 0.0,
    nesterov: bool = False,
    adapt: bool = True,
    lr_in_momentum: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return weight and momentum buffer after one step."""
    trust = 1.0
    if adapt and weight.norm() > 0 and grad.norm() > 0:
        trust = float(trust_coefficient * weight.norm() / (grad.norm() + weight_decay * weight.norm() + eps))
    decayed = trust * (grad + weight_decay * weight)
    inside, outside = (lr, 1.0) if lr_in_momentum else (1.0, lr)
    v = momentum * momentum_buffer + inside * decayed
    direction = momentum * v + inside * decayed if nesterov else v
    return weight - outside * direction, v
