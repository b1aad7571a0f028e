"""What a step keeps on the host, which a replay neither reads nor changes: random generators and plain attributes.

Snapshots are references and small values, never copies of tensors, so that they can be taken around any step.
"""

import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

PLAIN = (bool, int, float, str, type(None))
CONTAINERS = (list, dict, set, deque)
ITEMS_LOOKED_AT = 64


@dataclass(frozen=True, repr=False)
class Contents:
    """What a list, dict, set or deque held: its length, and its first items by value where plain, else by identity."""

    kind: str
    length: int
    items: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"a {self.kind} of {self.length}"


def host_random_state() -> dict[str, Any]:
    """Return the state of the host's generators under `python`, `numpy` and `torch`, for `random_changed`."""
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    inner = numpy_state["state"]
    return {
        "python": random.getstate(),
        "numpy": (inner["key"].tobytes(), inner["pos"], numpy_state["has_gauss"]),
        "torch": torch.get_rng_state(),
    }


def random_changed(before: Mapping[str, Any]) -> list[str]:
    """Return the names of the generators drawn from, or set, since `before` was taken."""
    now = host_random_state()
    return [
        name
        for name, state in before.items()
        if not (torch.equal(state, now[name]) if isinstance(state, Tensor) else state == now[name])
    ]


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return dotted path -> value of the int, float, bool, str and None attributes of a module and its submodules.

    A list, dict, set or deque is there as its `Contents`. What torch, Lightning and torchmetrics keep for themselves is
    left out.
    """
    return {
        path: _as_held(value)
        for path, owner, name, value in own_attributes(module)
        if isinstance(value, (*PLAIN, *CONTAINERS)) and not is_bookkeeping(owner, name)
    }


def tensor_attributes(module: nn.Module) -> dict[str, Tensor]:
    """Return dotted path -> tensor of the buffers and the plain tensor attributes of a module and its submodules.

    The states of a torchmetrics metric are such attributes. Parameters are left out, and so are tensors in containers.
    `setattr(module.get_submodule(parent), name, tensor)` puts one back.
    """
    found = {
        path: value
        for path, _, _, value in own_attributes(module)
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
    }
    return found | dict(module.named_buffers(remove_duplicate=False))


def attribute(owner: nn.Module, name: str) -> Any:
    """Return one attribute as the snapshots hold it; None if there is none."""
    return _as_held(vars(owner).get(name, owner._buffers.get(name)))


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the paths whose value came, went or is another: for tensors another object, for the rest another value."""
    return [
        path
        for path in dict.fromkeys([*before, *after])
        if path not in before or path not in after or not same(before[path], after[path])
    ]


def same(before: Any, after: Any) -> bool:
    """Whether two values of a snapshot are one: plain ones by type and value (NaN is itself), others by identity."""
    if before is after:
        return True
    if type(before) is not type(after) or not isinstance(before, (*PLAIN, Contents, tuple)):
        return False
    return bool(before == after) or (before != before and after != after)


def is_bookkeeping(owner: nn.Module, name: str) -> bool:
    """Whether an attribute is a torchmetrics metric's own, such as its count of updates, and none of its states."""
    return name.startswith("_") and isinstance(owner, Metric)


def own_attributes(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Yield path, owner, name and value of what hangs on a module and its submodules, the framework's own left out."""
    own = _framework_names()
    for path, owner in module.named_modules():
        prefix = f"{path}." if path else ""
        for name, value in vars(owner).items():
            if name not in own:
                yield prefix + name, owner, name, value


def _as_held(value: Any) -> Any:
    return _contents(value) if isinstance(value, CONTAINERS) else value


def _contents(container: Any) -> Contents:
    keys_and_values = container.items() if isinstance(container, dict) else ((None, item) for item in container)
    items = tuple(
        (key if isinstance(key, PLAIN) else id(key), value if isinstance(value, PLAIN) else id(value))
        for (key, value), _ in zip(keys_and_values, range(ITEMS_LOOKED_AT), strict=False)
    )
    return Contents(type(container).__name__, len(container), items)


@cache
def _framework_names() -> frozenset[str]:
    # `training` is left out as well: a step that changes modes changes them back, or its warm-up has done it.
    return frozenset(vars(nn.Module())) | frozenset(vars(pl.LightningModule()))
