"""LARS: momentum SGD whose learning rate is scaled for each tensor by its norm over its gradient's. Multi-tensor.

Source: You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks", arXiv 1708.03888, algorithm 1:

    trust = eta * |w| / (|g| + weight_decay * |w| + eps)
    v <- momentum * v + lr * trust * (g + weight_decay * w)
    w <- w - v

MLPerf's reference of ResNet-50 (mlcommons/training, retired_benchmarks/resnet-tf2, lars_optimizer.py) has the same
form, with eta 0.001, eps 0, trust 1 where either norm is 0, and batch norms and biases left out of trust and decay.
There the learning rate is inside of the momentum: after the rate has changed, earlier steps go on at their own rate.
The other form, torch.optim.SGD's, keeps it outside (`lr_in_momentum=False`):

    v <- momentum * v + trust * (g + weight_decay * w)
    w <- w - lr * v

NVIDIA's MLPerf submissions (MXNet's sgdwfastlars) scale the momentum by lr_t / lr_(t-1), which makes the first the
second.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fasttrain.callbacks.optimizers.layerwise import LayerwiseOptimizer, judge_number, zeros_for
from fasttrain.callbacks.optimizers.tensor_lists import (
    Number,
    add_,
    add_each_,
    computing_dtype,
    gradients,
    in_dtype,
    is_there,
    norms,
    plus,
    scale_,
    scaled,
)


class LARS(LayerwiseOptimizer):
    """LARS as a torch optimizer. Every number may be a 0-dim tensor on the device, which is then never read.

    It counts no steps, so that it can be captured in a CUDA graph as it is. State: `momentum_buffer`, and
    `master_weight` where there is one, fp32 for half-precision parameters. Takes no `found_inf`: a loss scaler decides
    about its steps as about any plain optimizer's. Sparse gradients and complex parameters are refused.

    Args:
        params: as for any torch optimizer; a group may set each of the following for itself.
        lr: learning rate, before trust scales it: MLPerf's ResNet-50 peaks at 7.4 to 24.7, by batch size.
        momentum: with the number 0 no buffer is kept.
        weight_decay: L2, added to the gradient.
        trust_coefficient: eta.
        eps: added to the denominator of trust.
        nesterov: descend along the gradient plus the momentum.
        adapt: scale by trust at all; False makes a group's step that of momentum SGD.
        lr_in_momentum: the paper's and MLPerf's form; False for torch.optim.SGD's.
        master_weights: update fp32 copies of half-precision parameters, kept as state, and round these to the
            parameters. They are made at a parameter's first step, so load weights before it or with the state.
        fused: update by Triton kernels, a few launches for all tensors. None takes them on an NVIDIA GPU for the
            parameters that they can update, which are float32, float16 or bfloat16 and without gaps in their memory;
            True refuses others at the first step.

    Raises:
        ValueError: a number is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Number,
        momentum: Number = 0.9,
        weight_decay: Number = 0.0,
        *,
        trust_coefficient: Number = 0.001,
        eps: Number = 0.0,
        nesterov: bool = False,
        adapt: bool = True,
        lr_in_momentum: bool = True,
        master_weights: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "nesterov": nesterov,
            "adapt": adapt,
            "lr_in_momentum": lr_in_momentum,
            "master_weights": master_weights,
            "fused": fused,
        }
        super().__init__(params, defaults)

    def judge(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError for a number out of its range."""
        for name in ("lr", "momentum", "weight_decay", "trust_coefficient", "eps"):
            judge_number(f"LARS's {name}", group[name], 0)
        if group["nesterov"] and not is_there(group["momentum"]):
            raise ValueError("LARS's nesterov is true with momentum 0; give a momentum, 0.9 for instance.")

    def take_step(self) -> None:
        """Update the parameters that have a gradient, and their state, in place."""
        for bucket in self.buckets():
            names = ("momentum", "weight_decay", "trust_coefficient", "eps", "nesterov", "adapt", "lr_in_momentum")
            numbers = {name: bucket.group[name] for name in ("lr", *names)}
            buffers = [self._buffer_of(param) for param in bucket.params] if is_there(numbers["momentum"]) else []
            if bucket.by_kernels:
                from fasttrain.callbacks.optimizers import in_triton  # it can't be imported without Triton

                in_triton.lars(self.tabled(bucket, ("momentum_buffer",) if buffers else ()), **numbers)
                continue
            weights = self.weights(bucket.params, bucket.group)
            grads = in_dtype(computing_dtype(bucket.params[0].dtype), gradients(bucket.params))
            lars_(weights, grads, buffers, **numbers)
            self.store(weights, bucket.params)

    def _buffer_of(self, param: Tensor) -> Tensor:
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = zeros_for(param)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


def lars_(
    weights: list[Tensor],
    grads: list[Tensor],
    momentum_buffers: list[Tensor],
    *,
    lr: Number,
    momentum: Number,
    weight_decay: Number,
    trust_coefficient: Number = 0.001,
    eps: Number = 0.0,
    nesterov: bool = False,
    adapt: bool = True,
    lr_in_momentum: bool = True,
) -> None:
    """Update weights and momentum buffers in place, without reading anything on the host.

    Args:
        weights: of one floating dtype and device, in which all is computed.
        grads: as many, of the same shapes and dtype; not changed.
        momentum_buffers: likewise; an empty list for no momentum.
        lr: learning rate; the other numbers as `LARS` has them.
        momentum: decay of the buffers.
        weight_decay: L2.
        trust_coefficient: eta.
        eps: added to the denominator of trust.
        nesterov: descend along the gradient plus the momentum.
        adapt: scale by trust.
        lr_in_momentum: the paper's and MLPerf's form.
    """
    # What the decayed gradient is multiplied by before the momentum, and what the result by after it.
    before: Number = lr if lr_in_momentum else 1.0
    after: Number = 1.0 if lr_in_momentum else lr
    if adapt:
        before = before * _trust(weights, grads, weight_decay, trust_coefficient, eps)
    decayed = plus(grads, weights, weight_decay) if is_there(weight_decay) else grads
    if not momentum_buffers:
        _add(weights, decayed, -after * before)
        return
    scale_(momentum_buffers, momentum)
    _add(momentum_buffers, decayed, before)
    if not nesterov:
        add_(weights, momentum_buffers, -after)
        return
    directions = scaled(momentum_buffers, momentum)
    _add(directions, decayed, before)
    add_(weights, directions, -after)


def _trust(
    weights: list[Tensor], grads: list[Tensor], weight_decay: Number, trust_coefficient: Number, eps: Number
) -> Tensor:
    """Return the factor of each tensor's learning rate, shape (len(weights),); 1 where weights or gradient are 0."""
    weight_norms, grad_norms = norms(weights), norms(grads)
    trust = trust_coefficient * weight_norms / (grad_norms + weight_decay * weight_norms + eps)
    return torch.where((weight_norms > 0) & (grad_norms > 0), trust, torch.ones_like(trust))


def _add(tensors: list[Tensor], others: list[Tensor], factor: Number) -> None:
    """Add the others, each times its element of a vector, or all times one number or scalar."""
    if isinstance(factor, Tensor) and factor.dim() == 1:
        add_each_(tensors, others, factor)
    else:
        add_(tensors, others, factor)
