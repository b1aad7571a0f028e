"""Which tensors are the host's: by their device on a GPU, by how they were made where the step runs on a CPU.

On a CPU every tensor is there, and a copy to the device is none. So this follows where tensors would be: one made
without a device (`torch.tensor(3.0)`, `torch.rand(2)`), or computed from such ones alone, is the host's; parameters,
batches and what is made with `device=` are the device's; `.to(device)` moves, `.cpu()` moves back.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fasttrain.batches import tensors_in

FROM_DATA = ("tensor", "as_tensor", "asarray", "new_tensor")
"""Functions that make a tensor from Python numbers or arrays."""
TO_HOST = ("cpu", "numpy", "tolist", "__array__")


@dataclass(frozen=True)
class Call:
    """A function or operator as it was called."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors among the arguments, inside of lists too."""
        return tensors_in([self.args, self.kwargs])


class HostTensors:
    """Tells the host's tensors from the device's, for steps on `device`."""

    def __init__(self, device: torch.device, known: Iterable[Tensor] = ()) -> None:
        self.follows = device.type == "cpu"
        self._host = WeakTensorKeyDictionary()
        for tensor in known:
            self.mark(tensor)

    def __contains__(self, tensor: object) -> bool:
        assert isinstance(tensor, Tensor)
        return tensor in self._host if self.follows else tensor.device.type == "cpu"

    def mark(self, tensor: Tensor) -> None:
        """Take a tensor for the host's from now on."""
        self._host[tensor] = True

    def all_in(self, tensors: Iterable[Tensor]) -> bool:
        """Whether there are tensors and all of them are the host's."""
        found = list(tensors)
        return bool(found) and all(tensor in self for tensor in found)

    def follow_operator(self, operator: Call, result: Any, function: Call | None) -> None:
        """Learn where an operator's results are.

        Args:
            operator: an operator of torch.
            result: what it returned.
            function: the function of torch's Python interface that called it, if one did.
        """
        if not self.follows:
            return
        inputs = list(operator.tensors())
        from_data = operator.name.startswith("aten::lift_fresh")
        if self.all_in(inputs) if inputs and not from_data else self._makes_on_host(function, from_data):
            for tensor in tensors_in([result]):
                if not any(tensor is each for each in inputs) or from_data:
                    self.mark(tensor)

    def follow_function(self, function: Call, result: Any) -> Any:
        """Learn what a function of the Python interface moved; return its result, which is a copy if it was moved."""
        if not self.follows or not isinstance(result, Tensor):
            return result
        destination = self.destination(function)
        if destination is None or destination == (function.args[0] in self):
            return result
        moved = result.clone()
        self._host.pop(moved, None)
        if destination:
            self.mark(moved)
        return moved

    def destination(self, function: Call) -> bool | None:
        """Return whether a function moves its first argument, a tensor, to the host (True), the device, or nowhere."""
        if not function.args or not isinstance(function.args[0], Tensor):
            return None
        if function.name == "cpu":
            return True
        if function.name not in ("to", "cuda", "type_as", "as_tensor"):
            return None
        second = function.args[1] if len(function.args) > 1 else None
        target = function.kwargs.get("device", function.kwargs.get("other", second))
        if isinstance(target, Tensor):
            return target in self
        # A torch.device is self.device or another tensor's: both are the device's, though they read "cpu" here.
        if isinstance(target, (torch.device, int)) or function.name == "cuda":
            return False
        return target.startswith("cpu") if isinstance(target, str) else None

    def _makes_on_host(self, function: Call | None, from_data: bool) -> bool:
        if function is None:
            return from_data
        device = function.kwargs.get("device")
        if device is not None:
            return isinstance(device, str) and device.startswith("cpu")
        if from_data and function.name != "new_tensor":
            return True
        return not any(tensor not in self for tensor in function.tensors())
