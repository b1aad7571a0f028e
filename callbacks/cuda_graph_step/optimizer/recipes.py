"""What torch needs, class by class, to take a learning rate from the device (torch/optim, 2.11 to 2.14)."""

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor
from torch.optim import ASGD, SGD, Adadelta, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

FLAGS = ("capturable", "foreach", "fused")


@dataclass(frozen=True)
class Recipe:
    """How one class of optimizers is made capturable."""

    flags: Mapping[str, bool]
    """What the groups' flags are during a step."""
    host_state: tuple[str, ...] = ("step",)
    """State that a plain optimizer keeps on the CPU and a capturable one on the device."""
    fused_if_open: bool = False
    """Use the fused kernel where the user chose neither `fused` nor `foreach`. Capturable foreach launches several
    small kernels for each parameter, the fused one reads every tensor once."""

    def flags_for(self, group: Mapping[str, Any], device: torch.device) -> dict[str, bool]:
        """Return the flags of one parameter group; on the CPU, where torch refuses `capturable`, the user's own."""
        if device.type != "cuda":
            # Only that foreach without capturable refuses a learning rate in a tensor.
            return {"foreach": False} if group.get("foreach") else {}
        flags = {key: value for key, value in self.flags.items() if key in group}
        is_open = group.get("fused") is None and group.get("foreach") is None
        if self.fused_if_open and is_open and all(p.is_floating_point() for p in group["params"]):
            flags["fused"] = True
        return flags


_CAPTURABLE = {"capturable": True}
RECIPES: dict[type[Optimizer], Recipe] = {
    # Its other paths, and those of RMSprop and Adadelta without foreach, pass -lr on as a number.
    SGD: Recipe({"fused": True, "foreach": False}, host_state=()),
    RMSprop: Recipe({"capturable": True, "foreach": True}),
    Adadelta: Recipe({"capturable": True, "foreach": True}),
    Adam: Recipe(_CAPTURABLE, fused_if_open=True),
    AdamW: Recipe(_CAPTURABLE, fused_if_open=True),
    NAdam: Recipe(_CAPTURABLE, host_state=("step", "mu_product")),
    RAdam: Recipe(_CAPTURABLE),
    Adamax: Recipe(_CAPTURABLE),
    Rprop: Recipe(_CAPTURABLE),
    ASGD: Recipe(_CAPTURABLE, host_state=()),
}


def known_class(optimizer: Optimizer) -> type[Optimizer] | None:
    """Return the class in RECIPES whose step this optimizer takes, its own or inherited unchanged; else None."""
    cls = type(optimizer)
    for base in cls.__mro__:
        if base in RECIPES:
            unchanged = all(
                unwrap(getattr(cls, name)) is unwrap(getattr(base, name)) for name in ("step", "_init_group")
            )
            return base if unchanged else None
    return None


def recipe_for(optimizer: Optimizer) -> Recipe:
    """Return a known class's recipe, or what can be tried with any other optimizer."""
    known = known_class(optimizer)
    if known is not None:
        return RECIPES[known]
    takes_the_flag = all("capturable" in group for group in optimizer.param_groups)
    return Recipe(_CAPTURABLE, ("step", "mu_product")) if takes_the_flag else Recipe({}, ())


def problem_of_tensors(optimizer: Optimizer, device: torch.device, complex_works: bool) -> str | None:
    """Return a sentence saying which of a known optimizer's tensors keeps its step from being captured, or None.

    Args:
        optimizer: of a class in RECIPES.
        device: where the step runs.
        complex_works: whether the kernels that are meant take complex parameters.
    """
    name = type(optimizer).__name__
    for number, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            return f"{name} is differentiable=True, which keeps its step in autograd's graph"
        tensors = [key for key, value in group.items() if key not in ("lr", "params") and _holds_tensor(value)]
        if tensors:
            return f"{name}'s {tensors[0]} is a tensor, which its step reads on the host; give a number"
        for index, parameter in enumerate(group["params"]):
            which = f"parameter {index} of {name}'s group {number}"
            if parameter.device != device:
                return f"{which} is on {parameter.device}, and the step runs on {device}"
            if parameter.is_complex() and not complex_works:
                return f"{which} is complex, and its update on the device takes real numbers only"
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                return f"{which} has a sparse gradient, of another size at each step"
    return None


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, list | tuple) and any(map(_holds_tensor, value)))
