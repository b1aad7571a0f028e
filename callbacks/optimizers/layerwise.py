"""What LAMB and LARS share as torch optimizers: groups that are judged, master weights, state that loads exactly."""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from fasttrain.callbacks.optimizers.tensor_lists import MOST_ELEMENTS, computing_dtype, in_dtype

MASTER = "master_weight"


class LayerwiseOptimizer(Optimizer):
    """Base of the optimizers whose step is scaled for each tensor. State of half-precision parameters is in fp32."""

    most_elements: int = MOST_ELEMENTS
    """How many elements are updated at a time; intermediate lists hold no more, unless one parameter does."""

    def judge(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError for a group's numbers that make no sense; those on the device are not looked at."""
        raise NotImplementedError

    def take_step(self) -> None:
        """Update the parameters that have a gradient, and their state, in place."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see `torch.optim.Optimizer.add_param_group`.

        Raises:
            ValueError: a number makes no sense.
        """
        super().add_param_group(param_group)
        self.judge(self.param_groups[-1])

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step; return what `closure`, called first with gradients enabled, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.take_step()
        return loss

    def weights(self, params: list[Tensor], group: Mapping[str, Any]) -> list[Tensor]:
        """Return what a step updates: the parameters, their fp32 master weights, or fp32 copies for this step."""
        dtype = computing_dtype(params[0].dtype)
        if not group["master_weights"] or params[0].dtype == dtype:
            return in_dtype(dtype, params)
        for param in params:
            state = self.state[param]
            if MASTER not in state:
                state[MASTER] = param.detach().to(dtype)
        return [self.state[param][MASTER] for param in params]

    def store(self, weights: list[Tensor], params: list[Tensor]) -> None:
        """Round updated weights to the parameters' own dtype; nothing where they are the parameters."""
        if weights is not params:
            torch._foreach_copy_(params, weights)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state; what is in fp32 for a half-precision parameter stays in fp32, unlike with torch's own."""
        super().load_state_dict(state_dict)
        keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, param in zip(keys, params, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, Tensor) and name in self.state[param] and name != "step":
                    self.state[param][name] = value.to(param.device, computing_dtype(param.dtype))


def zeros_for(param: Tensor) -> Tensor:
    """Return a moment of zeros, in fp32 for a half-precision parameter, with the parameter's strides."""
    return torch.zeros_like(param, dtype=computing_dtype(param.dtype), memory_format=torch.preserve_format)


def judge_number(name: str, value: Any, at_least: float, below: float = float("inf")) -> None:
    """Refuse a number out of its range; a tensor on the device is taken as it is.

    Raises:
        ValueError: the sentence names what would work.
    """
    if isinstance(value, Tensor):
        if value.dim() != 0:
            raise ValueError(f"{name} is a tensor of shape {tuple(value.shape)}; give a number or a 0-dim tensor.")
    elif not at_least <= value < below:
        limit = "" if below == float("inf") else f" and less than {below:g}"
        raise ValueError(f"{name} is {value}; give a number of {at_least:g} or more{limit}.")
