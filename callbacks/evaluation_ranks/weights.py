"""A module's weights as one buffer of bytes, to be handed over in one piece."""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fasttrain.errors import OptimizationError

ALIGNMENT = 16
"""Bytes; the largest element that torch has."""


class FlatWeights:
    """One buffer with room for all parameters and buffers of a module, those that it doesn't save included.

    Bits are kept as they are, whatever the dtype. The buffer lies on the device of the first tensor. The module's
    tensors are looked up anew each time, since modules may put others in their places.

    Args:
        module: whose weights are taken or set. Not changed but by `give`.

    Raises:
        OptimizationError: it has no weights.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        tensors = dict(_tensors(module))
        if not tensors:
            raise OptimizationError(
                f"evaluation_ranks: {type(module).__name__} has no parameters and no buffers, so there is nothing to "
                "hand over; leave it out."
            )
        self.layout = _layout(tensors)
        """A digest of names, shapes and dtypes: buffers of equal layout can be exchanged."""
        begins, end = [], 0
        for tensor in tensors.values():
            begins.append(end)
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self.flat = torch.zeros(end, dtype=torch.uint8, device=next(iter(tensors.values())).device)
        """The bytes."""
        self._views = [
            self.flat[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for begin, tensor in zip(begins, tensors.values(), strict=True)
        ]

    @torch.no_grad()
    def take(self) -> None:
        """Copy the module's weights into the buffer, on the current stream."""
        torch._foreach_copy_(self._views, self._current())

    @torch.no_grad()
    def give(self) -> None:
        """Copy the buffer into the module's weights, on the current stream."""
        torch._foreach_copy_(self._current(), self._views)

    def _current(self) -> list[Tensor]:
        tensors = dict(_tensors(self.module))
        if _layout(tensors) != self.layout:
            raise OptimizationError(
                f"evaluation_ranks: the weights of {type(self.module).__name__} have changed their names, shapes or "
                "dtypes since training began; evaluation ranks can't follow that. Leave it out."
            )
        return list(tensors.values())


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _layout(tensors: dict[str, Tensor]) -> str:
    described = "\n".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items())
    return hashlib.sha256(described.encode()).hexdigest()
