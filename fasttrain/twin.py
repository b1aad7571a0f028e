"""A second self of a fused operator's output: the same values, with a gradient of its own.

A tensor that is used twice has two gradients, which autograd adds by a pass over memory before the tensor's backward
begins. An operator that gives its output twice gets them apart, and adds them in its own backward.
"""

import torch
from torch import Tensor


def with_twin(y: Tensor, other: Tensor, room: str) -> Tensor:
    """Return y, which carries `other` from now on for those who ask for the room's twin."""
    setattr(y, _name(room), (other, y._version))
    return y


def twin_of(y: Tensor, room: str) -> Tensor:
    """Return what the room gave y for a second use; y itself, if that is nothing, or under torch.compile."""
    if torch.compiler.is_compiling():
        return y
    other: Tensor
    other, version = getattr(y, _name(room), (y, None))
    # Written to in place since, y has a history that its twin doesn't have.
    return other if version == y._version else y


def _name(room: str) -> str:
    return f"_fasttrain_{room}_twin"
