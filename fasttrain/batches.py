"""Batches of any structure: walking through their tensors, changing them, and telling what shape they have.

Mappings, sequences, named tuples and dataclasses are looked into, at any depth; everything else is a leaf.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

CONSTANTS = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.Size)
"""Leaves that are values: they can be compared, and a captured step may have them built in."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What two batches must have in common for one captured step to serve both: all but the tensors' values."""

    structure: Any
    """Container types, keys and constants, nested as the batch is."""
    tensors: tuple[tuple[torch.Size, torch.dtype], ...]

    def __str__(self) -> str:
        return " ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in self.tensors)


class OpaqueLeaf(TypeError):
    """A batch holds an object that is neither a tensor nor a value; the message names it and where it is."""


def map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch of the same structure with every tensor changed; other leaves are handed on as they are."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        made = {key: map_tensors(value, change) for key, value in batch.items()}
        if type(batch) is dict:
            return made
        if not isinstance(batch, MutableMapping):
            return type(batch)(made)  # type: ignore[call-arg]
        other = copy(batch)  # a subclass of dict may need more than its items to be made
        other.update(made)
        return other
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, change) for value in batch))
    if isinstance(batch, (list, tuple)) and not isinstance(batch, torch.Size):
        return type(batch)(map_tensors(value, change) for value in batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        return replace(batch, **{f.name: map_tensors(getattr(batch, f.name), change) for f in fields(batch) if f.init})
    return batch


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch, in the order in which `map_tensors` changes them."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from tensors_in(value)
    elif is_dataclass(batch) and not isinstance(batch, type):
        for field in fields(batch):
            yield from tensors_in(getattr(batch, field.name))


def flatten(batch: Any) -> tuple[list[Tensor], Signature]:
    """Return a batch's tensors in order and its signature. Costs about a microsecond a leaf.

    Raises:
        OpaqueLeaf: the batch holds something whose value can't be told from another's.
    """
    leaves: list[Tensor] = []
    structure = _structure(batch, leaves, "batch")
    return leaves, Signature(structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))


def _structure(value: Any, leaves: list[Tensor], path: str) -> Any:
    kind = type(value)
    if isinstance(value, Tensor):
        leaves.append(value)
        return Tensor
    if isinstance(value, CONSTANTS):
        return kind, value  # with its type, since 1 == True == 1.0
    if isinstance(value, Mapping):
        return kind, tuple((key, _structure(item, leaves, f"{path}[{key!r}]")) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return kind, tuple(_structure(item, leaves, f"{path}[{index}]") for index, item in enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        parts = ((f.name, getattr(value, f.name)) for f in fields(value))
        return kind, tuple((name, _structure(item, leaves, f"{path}.{name}")) for name, item in parts)
    raise OpaqueLeaf(f"{path} is a {kind.__module__}.{kind.__qualname__}")
