"""Whether an optimizer nobody here knows can be captured: try its step on copies, and see what it does on the host.

A captured step repeats its kernels only. So nothing may be read from the device in it, no Python number may advance,
and every tensor that it carries to the next step must stay where it is in memory.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from inspect import Parameter, signature
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from fasttrain.randomness import random_state_kept

Prepare = Callable[[Optimizer], Callable[[], AbstractContextManager[None]]]

LEARNING_RATE = "its learning rate"
SIZE_READERS = frozenset(
    {"nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave"}
)
"""Operators (of aten) whose result has a size that the host must be told."""
TORCH = Path(torch.__file__).parent


def dry_step_problem(optimizer: Optimizer, device: torch.device, prepare: Prepare) -> str | None:
    """Take two steps on copies of an optimizer's tensors; return why a captured step would go wrong, or None.

    Nothing of the optimizer's own is mutated. Needs the memory of its parameters, gradients and state once more, and
    waits for the device. A parameter without a gradient is given one.

    Args:
        optimizer: any.
        device: where its parameters are.
        prepare: given the copy, returns what is entered around each of its steps.
    """
    name = type(optimizer).__name__
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        return f"{name} evaluates the loss itself, as often as it wants to, in a closure that it asks for"
    try:
        twin = twin_of(optimizer)
    except Exception as error:
        return f"{name} holds what can't be copied to try its step on ({type(error).__name__}: {error})"
    try:
        with random_state_kept():
            prepared = prepare(twin)
            with prepared():
                twin.step()  # the first step makes the state, and may do so on the host
            before = _Observed(twin)
            with prepared(), HostReads(_labels(twin), device) as reads:
                twin.step()
            problems = [*reads.problems.values(), *before.changes(_Observed(twin), device)]
    except Exception as error:
        return f"{name}'s step fails with its learning rate on the device ({type(error).__name__}: {error})"
    finally:
        vars(twin).clear()  # its hooks refer to it: the copies would stay in memory until the next garbage collection
    return "; ".join(f"{name}{problem}" for problem in problems[:3]) or None


def twin_of(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer of the same class whose tensors are copies; hooks and patched methods are left out."""
    twin = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): twin}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            copied = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            if parameter.grad is not None:
                copied.grad = parameter.grad.detach().clone()
            elif parameter.requires_grad:
                copied.grad = torch.full_like(copied, 1e-3)
            memo[id(parameter)] = copied
    for key, value in vars(optimizer).items():
        is_patch = callable(value) and hasattr(type(optimizer), key)  # of `step` by a scheduler: it would step ours
        if is_patch or key.startswith("_optimizer_"):
            continue
        vars(twin)[key] = value if isinstance(value, nn.Module) else deepcopy(value, memo)
    Optimizer.__setstate__(twin, {})  # makes the empty tables of hooks
    return twin


class HostReads(TorchDispatchMode):
    """Finds operators that make the host wait for the device, or copy from it, while it is entered.

    Args:
        labels: tensors, and what a value computed from them is called; the first of a call's inputs in this order
            gives its name to the result.
        device: reads of it are looked for.
    """

    def __init__(self, labels: Iterable[tuple[Tensor, str]], device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.problems: dict[str, str] = {}
        """By place in the source: what is wrong there, to follow the optimizer's name."""
        self._device = device
        self._labels = WeakIdKeyDictionary()
        self._ranks: dict[str, int] = {}
        for tensor, label in labels:
            self._labels[tensor] = label
            self._ranks.setdefault(label, len(self._ranks))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        inputs = [leaf for leaf in tree_leaves((args, dict(kwargs or {}))) if isinstance(leaf, Tensor)]
        labels = sorted((self._labels[t] for t in inputs if t in self._labels), key=lambda label: self._ranks[label])
        result = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        problem = self._problem(func, inputs, outputs, labels[0] if labels else "a value")
        if problem is not None:
            where = _place(sys._getframe(1))
            self.problems.setdefault(where, f" {problem} ({where})")
        for output in outputs:
            if labels and output not in self._labels:
                self._labels[output] = labels[0]
        return result

    def _problem(self, func: Any, inputs: list[Tensor], outputs: list[Tensor], label: str) -> str | None:
        name = func.overloadpacket.__name__
        if not any(tensor.device == self._device for tensor in [*inputs, *outputs]):
            return None
        if name in ("_local_scalar_dense", "equal"):
            return f"reads {label} on the host"
        masks = name == "index" and any(each.dtype in (torch.bool, torch.uint8) for each in inputs[1:])
        if masks or name in SIZE_READERS:
            return f"has the host wait for the size of a result of {name}"
        if name in ("_to_copy", "copy_") and self._device.type != "cpu":
            devices = {each.device.type for each in [*inputs, *outputs]}
            if "cpu" in devices and len(devices) > 1:
                return f"copies {label} between the host and the device"
        return None


class _Observed:
    """Everything an optimizer keeps: its Python numbers, and where its tensors lie, by what they are called."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.numbers: dict[str, tuple[str, int | float]] = {}
        self.tensors: dict[str, tuple[str, int, torch.device]] = {}
        for path, label, value in _leaves(optimizer):
            if isinstance(value, Tensor):
                self.tensors[path] = (label, value.data_ptr() if value.layout == torch.strided else 0, value.device)
            else:
                self.numbers[path] = (label, value)

    def changes(self, after: "_Observed", device: torch.device) -> list[str]:
        """Return what a replay would leave behind, one sentence's end for each label."""
        found: dict[str, str] = {}
        for path, (label, value) in after.numbers.items():
            if path not in self.numbers or self.numbers[path][1] != value:
                found.setdefault(label, f"'s {label} is a Python number that a replay would not advance")
        for path, (label, address, where) in after.tensors.items():
            if path not in self.tensors or self.tensors[path][1] != address:
                found.setdefault(
                    label, f"'s {label} is another tensor after each step, and a replay would go on from the first one"
                )
            elif where != device and label.startswith("state"):
                found.setdefault(label, f"'s {label} is on {where}, where a replay on {device} would not advance it")
        return list(found.values())


def _leaves(optimizer: Optimizer) -> Iterator[tuple[str, str, Any]]:
    """Yield path, label and value of each number and tensor in an optimizer's parameters, groups, state, attributes."""
    seen: set[int] = set()

    def walk(value: Any, path: str, label: str) -> Iterator[tuple[str, str, Any]]:
        if isinstance(value, Tensor | int | float):
            yield path, label, value
            return
        if id(value) in seen or isinstance(value, nn.Module):
            return
        seen.add(id(value))
        if isinstance(value, Optimizer):
            yield from every(value, f"{path}.")
        elif isinstance(value, Mapping):
            for index, (key, item) in enumerate(value.items()):
                yield from walk(item, f"{path}[{key if isinstance(key, str | int) else index}]", label)
        elif isinstance(value, list | tuple | set):
            for index, item in enumerate(value):
                yield from walk(item, f"{path}[{index}]", label)

    def every(current: Optimizer, prefix: str) -> Iterator[tuple[str, str, Any]]:
        for number, group in enumerate(current.param_groups):
            for key, value in group.items():
                label = "parameter" if key == "params" else f"param group's {key!r}"
                yield from walk(value, f"{prefix}group[{number}][{key}]", label)
            for index, parameter in enumerate(group["params"]):
                for key, value in current.state.get(parameter, {}).items():
                    yield from walk(value, f"{prefix}state[{number}][{index}][{key}]", f"state {key!r}")
        for key, value in vars(current).items():
            if key not in ("param_groups", "state", "defaults") and not key.startswith("_optimizer_"):
                yield from walk(value, f"{prefix}{key}", f"attribute {key!r}")

    yield from every(optimizer, "")


def _labels(optimizer: Optimizer) -> Iterator[tuple[Tensor, str]]:
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), Tensor):
            yield group["lr"], LEARNING_RATE
    for path, label, value in _leaves(optimizer):
        if isinstance(value, Tensor) and "state" in path:
            yield value, f"its {label}"
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter.grad, "a value computed from the gradients"
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter, "a value computed from the parameters"


def _place(frame: FrameType | None) -> str:
    """Return file and line of the innermost frame that is the optimizer's own."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        inside_torch = TORCH in path.parents
        is_optimizer = path.parent == TORCH / "optim" and path.name != "optimizer.py"
        if (is_optimizer or not inside_torch) and path != Path(__file__):
            return f"{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown place"
