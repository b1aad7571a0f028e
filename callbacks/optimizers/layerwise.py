"""What LAMB and LARS share as torch optimizers: groups that are judged, master weights, state that loads exactly."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from fasttrain.callbacks.optimizers.tables import ADDRESSES, DeviceTables
from fasttrain.callbacks.optimizers.tensor_lists import MOST_ELEMENTS, buckets, computing_dtype, gradients, in_dtype
from fasttrain.callbacks.optimizers.tiers import KERNEL_DTYPES, TILING, laid_out_like, takes_kernels

if TYPE_CHECKING:
    from fasttrain.callbacks.optimizers.in_triton import TensorTables

MASTER = "master_weight"


@dataclass(frozen=True)
class Bucket:
    """Parameters that are updated together: of one group, dtype and device, each with a gradient."""

    params: list[Tensor]
    group: dict[str, Any]
    number: int
    """Of the group."""
    by_kernels: bool
    """By the Triton kernels, else by multi-tensor operators."""


class LayerwiseOptimizer(Optimizer):
    """Base of the optimizers whose step is scaled for each tensor. State of half-precision parameters is in fp32."""

    most_elements: int = MOST_ELEMENTS
    """How many elements multi-tensor operators update at a time; intermediate lists hold no more, unless one parameter
    does."""
    tiling = TILING
    """Of the kernels."""

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

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take state of before there were kernels, too."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("fused", None)

    @property
    def tables(self) -> DeviceTables:
        """Where the kernels look things up; they aren't part of a copy or a checkpoint."""
        made: DeviceTables = vars(self).setdefault("_tables", DeviceTables())
        return made

    def buckets(self) -> Iterator[Bucket]:
        """Yield the parameters that have a gradient.

        Raises:
            RuntimeError: a gradient is sparse, a parameter complex, or one of a group with `fused` has no kernel.
        """
        for number, group in enumerate(self.param_groups):
            params = [param for param in group["params"] if param.grad is not None]
            fit = [takes_kernels(param, group["fused"], type(self).__name__) for param in params]
            for by_kernels, most in ((True, 2**63), (False, self.most_elements)):
                chosen = [param for param, fits in zip(params, fit, strict=True) if fits == by_kernels]
                for bucket in buckets(chosen, most):
                    yield Bucket(bucket, group, number, by_kernels)

    def tabled(self, bucket: Bucket, names: Sequence[str]) -> "TensorTables":
        """Return a bucket as the kernels find it: what is updated, the parameters, and the state with these names.

        State that is laid out in another way than its parameter, as a checkpoint may have it, is replaced.
        """
        from fasttrain.callbacks.optimizers.in_triton import TensorTables  # it can't be imported without Triton

        params, dtype = bucket.params, bucket.params[0].dtype
        masters = self.masters(params, bucket.group)
        names = [*([] if masters is None else [MASTER]), *names]
        name = (bucket.number, dtype)
        found = self._addresses(params, names, masters is not None)
        if tuple(found) != self.tables.last((name, ADDRESSES), params[0].device):
            for param in params:
                state = self.state[param]
                state |= {key: laid_out_like(state[key], param, torch.float32) for key in names if key != "step"}
            found = self._addresses(params, names, masters is not None)
        grads = gradients(params)
        kinds = {grad.dtype for grad in grads}
        grad_dtype = grads[0].dtype if len(kinds) == 1 and kinds <= set(KERNEL_DTYPES) else torch.float32
        grads = [laid_out_like(grad, param, grad_dtype) for grad, param in zip(grads, params, strict=True)]
        updated = dtype if masters is None else torch.float32
        return TensorTables(self.tables, name, updated, dtype, found, grads, self.tiling)

    def _addresses(self, params: list[Tensor], names: Sequence[str], has_masters: bool) -> list[int]:
        """Return where the kernels find things, in the order of their rows."""
        own = [param.data_ptr() for param in params]
        states = [self.state[param] for param in params]
        rows = [[state[key].data_ptr() for state in states] for key in names]
        return [*(rows[0] if has_masters else own), *own, *chain.from_iterable(rows[has_masters:])]

    def masters(self, params: list[Tensor], group: Mapping[str, Any]) -> list[Tensor] | None:
        """Return fp32 master weights, which are made if there are none; None where the parameters are updated."""
        dtype = computing_dtype(params[0].dtype)
        if not group["master_weights"] or params[0].dtype == dtype:
            return None
        for param in params:
            state = self.state[param]
            if MASTER not in state:
                state[MASTER] = param.detach().to(dtype)
        return [self.state[param][MASTER] for param in params]

    def weights(self, params: list[Tensor], group: Mapping[str, Any]) -> list[Tensor]:
        """Return what a step updates: the parameters, their fp32 master weights, or fp32 copies for this step."""
        masters = self.masters(params, group)
        return in_dtype(computing_dtype(params[0].dtype), params) if masters is None else masters

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
