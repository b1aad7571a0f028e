"""SGD, Adam and AdamW with every hyperparameter a value on the device, so that a captured step follows all of them.

SGD as torch.optim.SGD documents it; Adam from arXiv 1412.6980; AdamW's decoupled decay from arXiv 1711.05101; AMSGrad
from Reddi et al., "On the Convergence of Adam and Beyond". State has torch's layout and dtypes. Numbers equal torch's
up to rounding: hyperparameters and bias corrections are computed in float64, as Python floats are, and rounded once;
half-precision parameters are updated in float32 and rounded once, as torch's fused kernels do.

A skipped step (`found_inf`) is a step with neutral hyperparameters and zero gradients: it leaves every bit as it was.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = list[Tensor] | tuple[Tensor, ...]


@dataclass(frozen=True)
class SGDValues:
    """One parameter group's hyperparameters, 0-dim float64 tensors on the device of its parameters.

    None stands for a zero that is part of the recorded work: no momentum buffer, no decay, no dampening.
    """

    lr: Tensor
    momentum: Tensor | None
    dampening: Tensor | None
    weight_decay: Tensor | None


@dataclass(frozen=True)
class AdamValues:
    """As SGDValues; without weight decay, None."""

    lr: Tensor
    beta1: Tensor
    beta2: Tensor
    eps: Tensor
    weight_decay: Tensor | None


class Skip:
    """Whether this step is to be skipped, on the device; with `found_inf` None it never is, at no cost.

    Args:
        found_inf: of one element, not 0 where the gradients hold an infinity or NaN.
        grad_scale: of one element, by which the gradients are to be divided.
    """

    def __init__(self, found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        self.bad = None if found_inf is None else found_inf.reshape(()) != 0
        self.grad_scale = None if grad_scale is None else grad_scale.reshape(())

    def zero(self, value: Tensor) -> Tensor:
        """Return the value; 0 where the step is skipped."""
        return value if self.bad is None else torch.where(self.bad, torch.zeros_like(value), value)

    def one(self, value: Tensor) -> Tensor:
        """Return the value; 1 where the step is skipped."""
        return value if self.bad is None else torch.where(self.bad, torch.ones_like(value), value)

    def gradients(self, grads: Tensors, maximize: bool) -> Tensors:
        """Return the gradients to descend along; zeros where the step is skipped. Does not mutate them."""
        if self.grad_scale is not None:
            grads = torch._foreach_div(grads, self.grad_scale.to(grads[0].dtype))
        if self.bad is not None:
            grads = [grad.masked_fill(self.bad, 0.0) for grad in grads]
        return torch._foreach_neg(grads) if maximize else grads


def sgd_(
    params: list[Tensor],
    grads: list[Tensor],
    momentum_buffers: list[Tensor | None],
    values: SGDValues,
    *,
    nesterov: bool = False,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Update parameters and momentum buffers in place, without reading anything on the host.

    Args:
        params: of one dtype and device.
        grads: as many, of the same shapes.
        momentum_buffers: as many; a None is filled with a buffer, whose first value is the gradient, undamped.
            Ignored without momentum.
        values: the hyperparameters.
        nesterov: descend along the gradient plus the momentum.
        maximize: ascend.
        grad_scale: what to divide the gradients by.
        found_inf: not 0 where nothing is to change. A buffer made in a skipped step is 0.
    """
    dtype, skip = _dtype_to_compute_in(params[0]), Skip(found_inf, grad_scale)
    weights = _in(dtype, params)
    direction: Tensors = skip.gradients(_in(dtype, grads), maximize)
    if values.weight_decay is not None:
        decay = skip.zero(values.weight_decay).to(dtype)
        direction = torch._foreach_add(direction, torch._foreach_mul(weights, decay))
    if values.momentum is not None:
        momentum = skip.one(values.momentum).to(dtype)
        buffers = _next_buffers(direction, grads, momentum_buffers, momentum, values.dampening)
        direction = torch._foreach_add(direction, torch._foreach_mul(buffers, momentum)) if nesterov else buffers
    torch._foreach_sub_(weights, torch._foreach_mul(direction, skip.zero(values.lr).to(dtype)))
    _store(weights, params)


def adam_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    values: AdamValues,
    *,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Update parameters, moments and step counts in place, without reading anything on the host.

    Args:
        params: of one dtype and device.
        grads: as many, of the same shapes.
        exp_avgs: first moments.
        exp_avg_sqs: second moments.
        max_exp_avg_sqs: their largest values so far, for AMSGrad; else empty.
        steps: how many steps each parameter has taken, 0-dim, on the device.
        values: the hyperparameters.
        decoupled_weight_decay: AdamW's decay of the weights in place of a term in the gradient.
        maximize: ascend.
        grad_scale: what to divide the gradients by.
        found_inf: not 0 where nothing is to change.
    """
    dtype, skip = _dtype_to_compute_in(params[0]), Skip(found_inf, grad_scale)
    weights, means, squares = _in(dtype, params), _in(dtype, exp_avgs), _in(dtype, exp_avg_sqs)
    direction: Tensors = skip.gradients(_in(dtype, grads), maximize)
    lr = skip.zero(values.lr)
    if values.weight_decay is not None and decoupled_weight_decay:
        torch._foreach_mul_(weights, (1 - lr * values.weight_decay).to(dtype))
    elif values.weight_decay is not None:
        direction = torch._foreach_add(direction, torch._foreach_mul(weights, values.weight_decay.to(dtype)))

    towards = torch._foreach_sub(direction, means)
    torch._foreach_mul_(towards, skip.zero(1 - values.beta1).to(dtype))
    torch._foreach_add_(means, towards)
    torch._foreach_mul_(squares, skip.one(values.beta2).to(dtype))
    scaled = torch._foreach_mul(direction, skip.zero(1 - values.beta2).to(dtype))
    torch._foreach_addcmul_(squares, scaled, direction)
    del towards, scaled, direction

    largest = _in(dtype, max_exp_avg_sqs)
    if largest:
        torch._foreach_maximum_(largest, squares)
    update = torch._foreach_sqrt(largest or squares)
    # Each parameter counts its own steps, so the bias corrections are one per parameter; as 0-dim operands they cost
    # a small kernel per parameter, like torch's own capturable implementation.
    taken = torch.stack(steps).double() + 1
    torch._foreach_div_(update, list((1 - values.beta2**taken).sqrt().to(dtype).unbind()))
    torch._foreach_add_(update, values.eps.to(dtype), alpha=1)  # without alpha, eps is taken for a number, and read
    update = torch._foreach_div(means, update)
    torch._foreach_mul_(update, list((lr / (1 - values.beta1**taken)).to(dtype).unbind()))
    torch._foreach_sub_(weights, update)

    torch._foreach_add_(steps, skip.zero(torch.ones_like(steps[0])), alpha=1)
    for computed, stored in ((weights, params), (means, exp_avgs), (squares, exp_avg_sqs), (largest, max_exp_avg_sqs)):
        _store(computed, stored)


def _next_buffers(
    direction: Tensors,
    grads: list[Tensor],
    momentum_buffers: list[Tensor | None],
    momentum: Tensor,
    dampening: Tensor | None,
) -> list[Tensor]:
    """Advance the momentum buffers, making those that are missing, and return them in the dtype of `direction`."""
    known = [index for index, buffer in enumerate(momentum_buffers) if buffer is not None]
    stored = [buffer for buffer in momentum_buffers if buffer is not None]
    advanced = _in(momentum.dtype, stored)
    if known:
        added: Tensors = [direction[index] for index in known]
        if dampening is not None:
            added = torch._foreach_mul(added, (1 - dampening).to(momentum.dtype))
        torch._foreach_mul_(advanced, momentum)
        torch._foreach_add_(advanced, added)
        _store(advanced, stored)
    by_index = dict(zip(known, advanced, strict=True))
    for index, buffer in enumerate(momentum_buffers):
        if buffer is None:
            by_index[index] = direction[index].clone()
            momentum_buffers[index] = torch.empty_like(grads[index]).copy_(direction[index])
    return [by_index[index] for index in range(len(direction))]


def _dtype_to_compute_in(param: Tensor) -> torch.dtype:
    return torch.promote_types(param.dtype, torch.float32)


def _in(dtype: torch.dtype, tensors: list[Tensor]) -> list[Tensor]:
    """Return the list itself where its tensors have the dtype already, else converted copies of them."""
    if all(tensor.dtype == dtype for tensor in tensors):
        return tensors
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def _store(computed: list[Tensor], stored: list[Tensor]) -> None:
    """Write converted copies back; nothing where `_in` made none."""
    if computed is not stored and stored:
        torch._foreach_copy_(stored, computed)
