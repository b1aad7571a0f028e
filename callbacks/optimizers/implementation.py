"""torch's fused and foreach implementations of SGD, Adam and AdamW, chosen for an optimizer that is already made.

The plain implementation launches several kernels for each parameter, foreach several for many parameters, fused one or
a few that read and write every tensor once. Numbers differ by rounding only.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

Implementation = Literal["fused", "foreach"]

CLASSES = (SGD, Adam, AdamW)


def optimizers_in(configured: Any) -> Iterator[Optimizer]:
    """Yield the optimizers in what a `configure_optimizers` returned, in any of the forms that Lightning takes."""
    if isinstance(configured, Optimizer):
        yield configured
    elif isinstance(configured, Mapping):
        yield from optimizers_in(list(configured.values()))
    elif isinstance(configured, list | tuple):
        for item in configured:
            yield from optimizers_in(item)


def why_not(optimizer: Optimizer, implementation: Implementation) -> str | None:
    """Return a sentence's end with the reason why an optimizer can't get an implementation, None if it can."""
    name = type(optimizer).__name__
    if type(optimizer) not in CLASSES:
        return f"{name} is none of torch's SGD, Adam and AdamW"
    groups = optimizer.param_groups
    if not any(map(_is_open, groups)):
        return f"{name} was made with an implementation of the user's choice (fused, foreach or differentiable)"
    params = [param for group in groups if _is_open(group) for param in group["params"]]
    if any(type(param) not in (Tensor, nn.Parameter) for param in params):
        return f"{name} has parameters of a tensor subclass, which may have no such kernels"
    if implementation == "foreach":
        on_device = [g for g in groups if _is_open(g) and isinstance(g["lr"], Tensor) and not g.get("capturable")]
        return f"{name}'s lr is a tensor, which foreach takes with capturable=True only" if on_device else None
    if not all(param.is_floating_point() for param in params):
        return f"{name} has complex parameters, and the fused kernels take real ones"
    if type(optimizer) is SGD and any(g["momentum"] != 0 for g in groups):
        if any(g["dampening"] != 0 for g in groups):
            return "SGD has dampening, with which torch's first fused step can't be prepared for late gradients"
        if not all(param.requires_grad for param in params):
            return "SGD has momentum and frozen parameters, whose first gradient torch's fused step could not take"
    return None


def sparse_embedding(module: nn.Module) -> str | None:
    """Return the path of an embedding whose gradients are sparse, which no fused step takes; None if there is none."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return next((path for path, each in module.named_modules() if isinstance(each, kinds) and each.sparse), None)


def use(optimizer: Optimizer, implementation: Implementation) -> Callable[[], None]:
    """Have the groups whose implementation is left open step by this one from now on; return what undoes it.

    Mutates the groups' `fused` or `foreach`, and where Adam's `step` lies; fused SGD gets its momentum buffers now, of
    zeros. While it holds, `state_dict()` has the flags and the placement of the optimizer without it, and state that is
    loaded comes under it too.

    `_step_supports_amp_scaling`, by which an optimizer made with fused=True takes unscaling over from the loss scaler,
    stays unset. So hooks and clipping see unscaled gradients, as before, and Lightning clips them at all: it refuses to
    for optimizers that unscale (Lightning-AI/pytorch-lightning#21435).

    Args:
        optimizer: one for which `why_not` returns None.
        implementation: the one to use.
    """
    open_groups = [index for index, group in enumerate(optimizer.param_groups) if _is_open(group)]

    def apply(_: Optimizer) -> None:
        for index in open_groups:
            group = optimizer.param_groups[index]
            group[implementation] = True
            _place_state(optimizer, group, implementation)

    def as_plain(_: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        groups, state = list(saved["param_groups"]), dict(saved["state"])
        for index in open_groups:
            groups[index] = {**groups[index], implementation: None}
            for key in groups[index]["params"]:
                if key in state and not groups[index].get("capturable"):
                    state[key] = {**state[key], **_steps_on_host(state[key])}
        return {**saved, "param_groups": groups, "state": state}

    hooks = [
        optimizer.register_load_state_dict_post_hook(apply),
        optimizer.register_state_dict_post_hook(as_plain),
    ]
    apply(optimizer)

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        for index in open_groups:
            group = optimizer.param_groups[index]
            group[implementation] = None
            for param in group["params"]:
                if param in optimizer.state and not group.get("capturable"):
                    optimizer.state[param].update(_steps_on_host(optimizer.state[param]))

    return undo


def _is_open(group: Mapping[str, Any]) -> bool:
    return group.get("fused") is None and group.get("foreach") is None and not group.get("differentiable")


def _place_state(optimizer: Optimizer, group: Mapping[str, Any], implementation: Implementation) -> None:
    """Bring the state of a group's parameters to where the implementation looks for it."""
    for param in group["params"]:
        if type(optimizer) is SGD and implementation == "fused" and group["momentum"] != 0:
            # Fused SGD takes either all buffers for new or none, and fails where one gradient came later than others.
            # The first momentum, 0 * momentum + gradient, is the same.
            if optimizer.state[param].get("momentum_buffer") is None:
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
        elif param in optimizer.state and implementation == "fused":
            state = optimizer.state[param]
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].to(param.device, torch.float32)
        elif param in optimizer.state and not group.get("capturable"):
            optimizer.state[param].update(_steps_on_host(optimizer.state[param]))


def _steps_on_host(state: Mapping[str, Any]) -> dict[str, Any]:
    return {"step": state["step"].cpu()} if isinstance(state.get("step"), Tensor) else {}
