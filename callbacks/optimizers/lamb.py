"""LAMB: Adam's update of each tensor, rescaled by the tensor's norm over the update's. Multi-tensor, capturable.

Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", arXiv 1904.00962,
algorithm 2, with phi the identity. The global clip, `grad_averaging`, L2 mode and the rule that a tensor without
weight decay is not rescaled, which `use_nvlamb` lifts, are those of NVIDIA/apex (csrc/multi_tensor_lamb.cu), with which
the MLPerf submissions of BERT and RNN-T train.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fasttrain.callbacks.optimizers.layerwise import Bucket, LayerwiseOptimizer, judge_number, zeros_for
from fasttrain.callbacks.optimizers.tensor_lists import (
    Number,
    add_,
    add_each_,
    add_number_,
    add_squares_,
    computing_dtype,
    each,
    gradients,
    in_dtype,
    is_there,
    norms,
    plus,
    scale_,
    scaled,
    together,
)

if TYPE_CHECKING:
    from fasttrain.callbacks.optimizers.in_triton import TensorTables


class LAMB(LayerwiseOptimizer):
    """LAMB as a torch optimizer. Every number may be a 0-dim tensor on the device, which is then never read.

    State: `step` (0-dim fp32: on the CPU, or beside the parameter where `capturable`), `exp_avg`, `exp_avg_sq`, and
    `master_weight` where there is one. All are fp32 for half-precision parameters. Takes no `found_inf`: a loss scaler
    decides about its steps as about any plain optimizer's. Sparse gradients and complex parameters are refused.

    Args:
        params: as for any torch optimizer; a group may set each of the following for itself.
        lr: learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment; 1e-6 for BERT, 1e-9 for RNN-T in MLPerf.
        weight_decay: added to the update, decoupled, before it is rescaled. A group in which it is the number 0 is not
            rescaled.
        bias_correction: divide the moments by 1 - beta^step.
        grad_averaging: weigh the gradient by 1 - beta1 in the first moment, else by 1.
        max_grad_norm: the gradients of all groups together are scaled down to this norm before anything else; None
            leaves them. With it, don't also clip elsewhere.
        adam_w_mode: decoupled weight decay; else it is added to the gradient, as L2 regularization is.
        use_nvlamb: rescale tensors without weight decay too.
        adapt: rescale at all; False makes a group's step that of AdamW.
        capturable: keep `step` on the device, so that steps can be captured in a CUDA graph.
        master_weights: update fp32 copies of half-precision parameters, kept as state, and round these to the
            parameters. They are made at a parameter's first step, so load weights before it or with the state.
        fused: update by Triton kernels, a few launches for all tensors, with `step` on the device. None takes them on
            an NVIDIA GPU for the parameters that they can update, which are float32, float16 or bfloat16 and without
            gaps in their memory; True refuses others at the first step.

    Raises:
        ValueError: a number is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 1e-3,
        betas: tuple[Number, Number] = (0.9, 0.999),
        eps: Number = 1e-6,
        weight_decay: Number = 0.01,
        *,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: Number | None = 1.0,
        adam_w_mode: bool = True,
        use_nvlamb: bool = False,
        adapt: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
            "adam_w_mode": adam_w_mode,
            "use_nvlamb": use_nvlamb,
            "adapt": adapt,
            "capturable": capturable,
            "master_weights": master_weights,
            "fused": fused,
        }
        super().__init__(params, defaults)

    def judge(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError for a number out of its range."""
        judge_number("LAMB's lr", group["lr"], 0)
        for beta in group["betas"]:
            judge_number("LAMB's beta", beta, 0, 1)
        judge_number("LAMB's eps", group["eps"], 0)
        judge_number("LAMB's weight_decay", group["weight_decay"], 0)
        most = group["max_grad_norm"]
        if most is not None and not isinstance(most, Tensor) and not most > 0:
            raise ValueError(f"LAMB's max_grad_norm is {most}; give a number above 0, or None to clip nothing.")

    def take_step(self) -> None:
        """Update the parameters that have a gradient, and their state, in place."""
        parts = [(bucket, self._tabled(bucket) if bucket.by_kernels else None) for bucket in self.buckets()]
        norm = None
        if any(group["max_grad_norm"] is not None for group in self.param_groups):
            norm = together([_norm(bucket, lists) for bucket, lists in parts])
        for bucket, lists in parts:
            if lists is None:
                self._update(bucket.params, bucket.group, norm)
            else:
                self._update_by_kernels(lists, bucket.group, norm)

    def _tabled(self, bucket: Bucket) -> "TensorTables":
        for param in bucket.params:
            self._state_of(param, bucket.group, on_device=True)
        return self.tabled(bucket, ("exp_avg", "exp_avg_sq", "step"))

    def _update_by_kernels(self, lists: "TensorTables", group: Mapping[str, Any], norm: Tensor | None) -> None:
        from fasttrain.callbacks.optimizers import in_triton  # it can't be imported without Triton

        shared = ("max_grad_norm", "lr", "betas", "eps", "weight_decay", "bias_correction", "grad_averaging")
        in_triton.lamb(
            lists,
            norm=None if norm is None else norm.to(lists.device),
            adam_w_mode=group["adam_w_mode"],
            adapt=_adapts(group),
            **{name: group[name] for name in shared},
        )

    def _update(self, params: list[Tensor], group: Mapping[str, Any], norm: Tensor | None) -> None:
        states = [self._state_of(param, group, group["capturable"]) for param in params]
        dtype, device = computing_dtype(params[0].dtype), params[0].device
        weights = self.weights(params, group)
        divisor = None
        if norm is not None and group["max_grad_norm"] is not None:
            excess = norm.to(device) / group["max_grad_norm"]
            divisor = torch.where(excess > 1, excess, torch.ones_like(excess)).to(dtype)
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        lamb_(
            weights,
            in_dtype(dtype, gradients(params)),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            torch.stack(steps).double() if group["bias_correction"] else None,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            divisor=divisor,
            grad_averaging=group["grad_averaging"],
            adam_w_mode=group["adam_w_mode"],
            adapt=_adapts(group),
        )
        self.store(weights, params)

    def _state_of(self, param: Tensor, group: Mapping[str, Any], on_device: bool) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        device = param.device if on_device else torch.device("cpu")
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state["exp_avg"], state["exp_avg_sq"] = zeros_for(param), zeros_for(param)
        elif state["step"].device != device:
            state["step"] = state["step"].to(device)  # a flag was set after the first step
        return state


def _adapts(group: Mapping[str, Any]) -> bool:
    return bool(group["adapt"]) and (bool(group["use_nvlamb"]) or is_there(group["weight_decay"]))


def _norm(bucket: Bucket, lists: "TensorTables | None") -> Tensor:
    if lists is None:
        norm: Tensor = torch.linalg.vector_norm(norms(gradients(bucket.params)))
        return norm
    from fasttrain.callbacks.optimizers import in_triton  # it can't be imported without Triton

    return in_triton.gradients_norm(lists)


def lamb_(
    weights: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: Tensor | None,
    *,
    lr: Number,
    beta1: Number,
    beta2: Number,
    eps: Number,
    weight_decay: Number,
    divisor: Tensor | None = None,
    grad_averaging: bool = True,
    adam_w_mode: bool = True,
    adapt: bool = True,
) -> None:
    """Update weights and moments in place. Reads nothing on the host, unless `steps` are there and the weights not.

    Args:
        weights: of one floating dtype and device, in which all is computed.
        grads: as many, of the same shapes and dtype, as the lists that follow; not changed.
        exp_avgs: first moments.
        exp_avg_sqs: second moments.
        steps: how many steps each tensor has taken with this one, shape (len(weights),), fp64, on the device of the
            weights or on the CPU; None for no bias correction.
        lr: learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the corrected second moment.
        weight_decay: see `LAMB`.
        divisor: what to divide all gradients by, 0-dim.
        grad_averaging: see `LAMB`.
        adam_w_mode: see `LAMB`.
        adapt: rescale each tensor's update by the norm of its weights over that of its update, where neither is 0.
    """
    if divisor is not None:
        grads = scaled(grads, 1 / divisor)
    if is_there(weight_decay) and not adam_w_mode:
        grads = plus(grads, weights, weight_decay)
    scale_(exp_avgs, beta1)
    add_(exp_avgs, grads, 1 - beta1 if grad_averaging else 1.0)
    scale_(exp_avg_sqs, beta2)
    add_squares_(exp_avg_sqs, grads, 1 - beta2)
    updates = _directions(exp_avgs, exp_avg_sqs, steps, beta1, beta2, eps)
    if is_there(weight_decay) and adam_w_mode:
        add_(updates, weights, weight_decay)
    if adapt:
        weight_norms, update_norms = norms(weights), norms(updates)
        both = (weight_norms > 0) & (update_norms > 0)
        ratios = torch.where(both, weight_norms / update_norms, torch.ones_like(weight_norms))
        add_each_(weights, updates, -lr * ratios)
    else:
        add_(weights, updates, -lr)


def _directions(
    exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor], steps: Tensor | None, beta1: Number, beta2: Number, eps: Number
) -> list[Tensor]:
    """Return (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) for each tensor, in new memory."""
    denominators = list(torch._foreach_sqrt(exp_avg_sqs))
    if steps is None:
        add_number_(denominators, eps)
        return list(torch._foreach_div(exp_avgs, denominators))
    device, dtype = exp_avgs[0].device, exp_avgs[0].dtype
    if any(isinstance(number, Tensor) for number in (beta1, beta2, eps)):
        steps = steps.to(device)
    # Numerator and denominator times sqrt(1 - beta2^t): so both corrections ride on passes over the elements that are
    # made anyway.
    roots = (1 - torch.pow(beta2, steps)).sqrt()
    torch._foreach_add_(denominators, each(eps * roots, device, dtype))
    directions = list(torch._foreach_div(exp_avgs, denominators))
    torch._foreach_mul_(directions, each(roots / (1 - torch.pow(beta1, steps)), device, dtype))
    return directions
