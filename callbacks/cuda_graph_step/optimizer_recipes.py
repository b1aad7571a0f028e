"""What torch needs, class by class, to take a learning rate from the device (torch/optim, 2.11 to 2.14)."""

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import torch
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
        """Return the flags of one parameter group; on the CPU, where torch refuses `capturable`, none."""
        if device.type != "cuda":
            return {}
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
