"""The text by which a site is known again, in whatever model it is found: what it computes, of what, and how.

Values are no part of it, and neither is a parameter's layout or device, because a run may change both.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from fasttrain.batches import CONSTANTS, OpaqueLeaf, flatten, named_tensors

DECIDES_ONLY = ("measure", "least_gain")
"""Parameters of a room that have no part in what its fused form does."""


@dataclass(frozen=True)
class Call:
    """What a module is called with, once, in a training step."""

    inputs: tuple[str, ...]
    """Each tensor: dtype, shape, layout, and whether it has a gradient."""
    structure: str
    """Everything else about the arguments, values that are no tensors included."""
    mode: str
    """Autocast's dtype, and whether gradients are recorded."""

    def __str__(self) -> str:
        return ", ".join([*self.inputs, *filter(None, [self.mode])])


def call_of(arguments: Sequence[Any], named: Mapping[str, Any], mode: str) -> Call:
    """Return the text of a call's arguments; `mode` says under what it is made."""
    given = (tuple(arguments), dict(named))
    try:
        structure = str(flatten(given)[1].structure)
    except OpaqueLeaf as error:
        structure = str(error)
    return Call(tuple(tensor_text(tensor) for _, tensor in named_tensors(given)), structure, mode)


def tensor_text(tensor: Tensor) -> str:
    """Return dtype, shape, layout and need of a gradient, as `float16[16, 64, 8, 8] channels_last grad`."""
    words = [_shape_text(tensor)]
    if not tensor.is_contiguous():
        is_nhwc = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
        words.append("channels_last" if is_nhwc else f"strides {list(tensor.stride())}")
    return " ".join([*words, *(["grad"] if tensor.requires_grad else [])])


def module_text(module: nn.Module) -> str:
    """Return what decides how a module computes: classes, values, modes, and its tensors' shapes; a line for each."""
    lines = []
    for path, part in module.named_modules(remove_duplicate=False):
        kind = f"{type(part).__module__}.{type(part).__qualname__}({part.extra_repr()})"
        values = {name: _value_text(value) for name, value in sorted(vars(part).items()) if _is_value(name, value)}
        tensors = {**part._parameters, **part._buffers}.items()
        shapes = {name: "none" if tensor is None else _parameter_text(tensor) for name, tensor in tensors}
        lines.append(f"{path}: {kind} {values} {shapes}")
    return "\n".join(lines)


def site_key(room: str, plain: nn.Module, calls: Sequence[Call], precision: str) -> str:
    """Return the name under which a site's times are kept: room, precision, and a digest of all else."""
    text = "\n".join([module_text(plain), *(repr(call) for call in calls)])
    return f"{room} {precision} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def room_text(name: str, config: Any) -> str:
    """Return a room's name, with those values of its configuration that may change what its fused form does."""
    values = {key: value for key, value in sorted(vars(config).items()) if key not in DECIDES_ONLY}
    return f"{name} {values}" if values else name


def precision_text(precision: str) -> str:
    """Return Lightning's name of a precision, with what else decides about fp32 matrix products."""
    matmul = torch.get_float32_matmul_precision()
    return precision if matmul == "highest" else f"{precision}, float32 matmul {matmul}"


def _parameter_text(tensor: Tensor) -> str:
    if isinstance(tensor, nn.UninitializedParameter):
        return "lazy"
    return f"{_shape_text(tensor)}{' trained' if tensor.requires_grad else ''}"


def _shape_text(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _is_value(name: str, value: Any) -> bool:
    parts = value if isinstance(value, (tuple, list)) else (value,)
    kinds = (*CONSTANTS, FunctionType, BuiltinFunctionType, type)
    return not name.startswith("_") and all(isinstance(part, kinds) for part in parts)


def _value_text(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return str([_value_text(part) for part in value])
    if isinstance(value, (FunctionType, BuiltinFunctionType, type)):
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value)
