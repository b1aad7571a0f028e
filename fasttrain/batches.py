"""Batches of any structure: walking through their tensors, changing them, and telling what shape they have.

Mappings, sequences, named tuples and dataclasses are looked into, at any depth; everything else is a leaf, torch's
PackedSequence too, whose lengths belong on the host. Of a dataclass all attributes count, also those that are no
fields: what it computed of its fields belongs to the batch.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

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
    if isinstance(batch, PackedSequence):
        return batch
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, change) for value in batch))
    if isinstance(batch, (list, tuple)) and not isinstance(batch, torch.Size):
        return type(batch)(map_tensors(value, change) for value in batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        changed: Any = copy(batch)
        for name, value in _attributes(batch).items():
            object.__setattr__(changed, name, map_tensors(value, change))  # a frozen one has no other way
        return changed
    return batch


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch, in the order in which `map_tensors` changes them."""
    for _, tensor in named_tensors(batch):
        yield tensor


def named_tensors(batch: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield place and tensor (`0`, `input_ids`, `1.labels`) in the order in which `map_tensors` changes them."""
    if isinstance(batch, Tensor):
        yield place, batch
        return
    parts: Any = ()
    if isinstance(batch, Mapping):
        parts = batch.items()
    elif isinstance(batch, PackedSequence):
        return
    elif isinstance(batch, tuple) and hasattr(batch, "_fields"):
        parts = zip(batch._fields, batch, strict=True)
    elif isinstance(batch, (list, tuple)):
        parts = enumerate(batch)
    elif is_dataclass(batch) and not isinstance(batch, type):
        parts = _attributes(batch).items()
    for name, part in parts:
        yield from named_tensors(part, f"{place}.{name}" if place else str(name))


def flatten(batch: Any) -> tuple[list[Tensor], Signature]:
    """Return a batch's tensors in order and its signature. Costs about a microsecond a leaf.

    Raises:
        OpaqueLeaf: the batch holds something whose value can't be told from another's.
    """
    leaves: list[Tensor] = []
    structure = _structure(batch, leaves, "batch")
    return leaves, Signature(structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))


def first_difference(one: Signature, other: Signature) -> str:
    """Return where two signatures differ first, as `batch[2][0] is 'a.jpg', then 'b.jpg'`."""
    if (found := _differs(one.structure, other.structure, "batch")) is not None:
        return found
    shapes = zip(one.tensors, other.tensors, strict=True)
    number, (before, after) = next((i, pair) for i, pair in enumerate(shapes) if pair[0] != pair[1])
    return f"tensor {number} is {list(before[0])} {before[1]}, then {list(after[0])} {after[1]}"


def _differs(one: Any, other: Any, path: str) -> str | None:
    if one == other:
        return None
    if one is Tensor or other is Tensor or one[0] is not other[0] or issubclass(one[0], CONSTANTS):
        return f"{path} is {_of_structure(one)}, then {_of_structure(other)}"
    if [name for name, _ in one[1]] != [name for name, _ in other[1]]:
        return f"{path} has {len(one[1])} parts, then {len(other[1])}"
    parts = zip(one[1], other[1], strict=True)
    return next(found for (name, a), (_, b) in parts if (found := _differs(a, b, f"{path}[{name!r}]")) is not None)


def _of_structure(structure: Any) -> str:
    if structure is Tensor:
        return "a tensor"
    return repr(structure[1]) if issubclass(structure[0], CONSTANTS) else f"a {structure[0].__name__}"


def _structure(value: Any, leaves: list[Tensor], path: str) -> Any:
    kind = type(value)
    if isinstance(value, Tensor):
        leaves.append(value)
        return Tensor
    if isinstance(value, CONSTANTS):
        return kind, value  # with its type, since 1 == True == 1.0
    if isinstance(value, Mapping):
        return kind, tuple((key, _structure(item, leaves, f"{path}[{key!r}]")) for key, item in value.items())
    if isinstance(value, (list, tuple)) and not isinstance(value, PackedSequence):  # whose lengths steer the host
        return kind, tuple((index, _structure(item, leaves, f"{path}[{index}]")) for index, item in enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        parts = _attributes(value).items()
        return kind, tuple((name, _structure(item, leaves, f"{path}.{name}")) for name, item in parts)
    raise OpaqueLeaf(f"{path} is a {kind.__module__}.{kind.__qualname__}")


def _attributes(value: Any) -> dict[str, Any]:
    """Return a dataclass's fields and its other attributes."""
    return {f.name: getattr(value, f.name) for f in fields(value)} | getattr(value, "__dict__", {})
