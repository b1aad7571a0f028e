"""The step of one parameter group with device values, its state made and found where torch has it."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from fasttrain.callbacks.cuda_graph_step.optimizer.device_update import AdamValues, SGDValues, adam_, sgd_


@dataclass(frozen=True)
class Update:
    """The update of one optimizer class's parameter groups."""

    names: tuple[str, ...]
    """Its hyperparameters that are device values."""
    zeros: tuple[str, ...]
    """Those of them for which 0 means less work, or no state: whether they are 0 is part of what is recorded."""
    read: Callable[[Mapping[str, Any]], tuple[float, ...]]
    """Gives their host values, in the order of `names`."""
    update: Callable[[Optimizer, dict[str, Any], Mapping[str, Tensor]], None]
    """Given an optimizer, one of its groups and the device values by name, takes the group's step in place, with state
    as torch lays it out. Honours `found_inf` and `grad_scale` on the optimizer, as torch's fused kernels do; unlike
    these it leaves the gradients scaled."""


def _read_sgd(group: Mapping[str, Any]) -> tuple[float, ...]:
    return group["lr"], group["momentum"], group["dampening"], group["weight_decay"]


def _read_adam(group: Mapping[str, Any]) -> tuple[float, ...]:
    return group["lr"], *group["betas"], group["eps"], group["weight_decay"]


def _update_sgd(optimizer: Optimizer, group: dict[str, Any], values: Mapping[str, Tensor]) -> None:
    names = ("momentum", "dampening", "weight_decay")
    used = SGDValues(values["lr"], **{name: values[name] if group[name] != 0 else None for name in names})
    for params, grads in _by_dtype(group):
        states = [optimizer.state[p] for p in params] if used.momentum is not None else [{} for _ in params]
        buffers = [state.get("momentum_buffer") for state in states]
        sgd_(
            params,
            grads,
            buffers,
            used,
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            grad_scale=getattr(optimizer, "grad_scale", None),
            found_inf=getattr(optimizer, "found_inf", None),
        )
        for state, buffer in zip(states, buffers, strict=True):
            state["momentum_buffer"] = buffer


def _update_adam(optimizer: Optimizer, group: dict[str, Any], values: Mapping[str, Tensor]) -> None:
    decay = values["weight_decay"] if group["weight_decay"] != 0 else None
    used = AdamValues(values["lr"], values["beta1"], values["beta2"], values["eps"], decay)
    keys = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))
    for params, grads in _by_dtype(group):
        states = [optimizer.state[p] for p in params]
        for param, state in zip(params, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
                state.update({key: torch.zeros_like(param, memory_format=torch.preserve_format) for key in keys})
        adam_(
            params,
            grads,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
            [state["step"] for state in states],
            used,
            decoupled_weight_decay=group.get("decoupled_weight_decay", False),
            maximize=group["maximize"],
            grad_scale=getattr(optimizer, "grad_scale", None),
            found_inf=getattr(optimizer, "found_inf", None),
        )


def _by_dtype(group: Mapping[str, Any]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield a group's parameters that have a gradient, and the gradients, of one dtype at a time."""
    params: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for param in group["params"]:
        if param.grad is not None:
            params[param.dtype].append(param)
    for same in params.values():
        yield same, [param.grad for param in same if param.grad is not None]


_ADAM = Update(
    names=("lr", "beta1", "beta2", "eps", "weight_decay"),
    zeros=("weight_decay",),
    read=_read_adam,
    update=_update_adam,
)
UPDATES: dict[type[Optimizer], Update] = {
    SGD: Update(
        names=("lr", "momentum", "dampening", "weight_decay"),
        zeros=("momentum", "dampening", "weight_decay"),
        read=_read_sgd,
        update=_update_sgd,
    ),
    Adam: _ADAM,
    AdamW: _ADAM,
}
