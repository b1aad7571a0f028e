"""State that a step carries to the next one in attributes: `self.ema = 0.9 * self.ema + 0.1 * x`.

A replay runs kernels, not assignments: the attribute would go on holding the tensor of the capture, and the next replay
would read the old one (pytorch/pytorch#114844). Here each such attribute gets one static tensor; at the end of the
step its new value is copied there, inside the graph, and the attribute holds the static tensor again. States of
torchmetrics are of this kind; their counts of updates, which are Python numbers, are kept beside.

Tensors that hang on the module or a callback by containers and objects (`self.ema.shadow[0]`) and are written to in
place need nothing for a replay. They are known here so that checking it does not write to them twice.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from fasttrain.callbacks.cuda_graph_step.host_state import PLAIN, own_attributes, tensor_attributes
from fasttrain.errors import OptimizationError

MOST_LOOKED_AT = 20_000
"""Objects and items of containers that are looked at for tensors; a container with more is passed over."""

LIBRARIES = ("builtins", "functools", "types", "numpy", "torch", "torchmetrics", "lightning", "pytorch_lightning")
"""Packages whose objects hold no state of a user's step."""


class CarriedState:
    """The tensors that a module's step sets anew, by path, and the metrics that it updates."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.static: dict[str, Tensor] = {}
        """Every tensor found so far that the step changes, parameters and buffers aside."""
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        self._metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
        self._updates: list[tuple[dict[str, Any], int]] = []
        """Attributes of each metric that the step updates, and its updates a step."""

    def before(self) -> None:
        """Note the state before an eager step, from which `after` learns what the step sets anew."""
        self._tensors, self._lengths = tensor_attributes(self.module), self._list_lengths()
        self._hanging = hanging_tensors(self.module)
        # Buffers that are written to in place are known to everybody; only those set anew are of interest.
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        others = [(path, tensor) for path, tensor in self._tensors.items() if path not in buffers]
        self._marks = {path: _mark(tensor) for path, tensor in (*others, *self._hanging.items())}
        self._counts = [metric._update_count for metric in self._metrics]

    def after(self) -> None:
        """Compare with the state after it.

        Raises:
            OptimizationError: a metric keeps a list that grows with every step, or a tensor on the host is written to.
        """
        for path, tensor in tensor_attributes(self.module).items():
            if path not in self._tensors or path in self.static or self._is_cache(path):
                continue
            # One that is written to in place stays where it is only until somebody resets it.
            if tensor is not self._tensors[path] or (path in self._marks and _mark(tensor) != self._marks[path]):
                self._refuse_host(path, tensor)
                self.static[path] = tensor.detach().clone()
                self._places[path] = self._place(path)
        for path, tensor in self._hanging.items():
            if _mark(tensor) != self._marks[path]:
                self._refuse_host(path, tensor)
                self.static[path] = tensor
        self._updates = [
            (vars(metric), metric._update_count - count)
            for metric, count in zip(self._metrics, self._counts, strict=True)
            if metric._update_count > count
        ]
        grown = [name for name, length in self._list_lengths().items() if length > self._lengths[name]]
        if grown:
            raise OptimizationError(
                f"the metric's state {grown[0]} is a list that grows with every step, which a replay can't do; give "
                "the metric `thresholds`, so that it counts in bins, or update it in on_train_batch_end"
            )
        self._tensors, self._hanging, self._marks = {}, {}, {}

    def bind(self, as_they_were: bool = False) -> None:
        """Have every attribute hold its static tensor, before a step.

        Args:
            as_they_were: with the static tensor's own value; else with the value that the attribute holds now.
        """
        for path, (attributes, name) in self._places.items():
            static, current = self.static[path], attributes[name]
            if current is not static:
                if isinstance(current, Tensor) and not as_they_were:
                    static.copy_(current)
                attributes[name] = static

    def carry_over(self) -> None:
        """Copy what the step set anew into the static tensors, and bind these again. At its end; may be captured.

        Raises:
            OptimizationError: a tensor's shape or dtype changed.
        """
        for path, (attributes, name) in self._places.items():
            static, new = self.static[path], attributes[name]
            if new is static:
                continue
            if new.shape != static.shape or new.dtype != static.dtype:
                raise OptimizationError(
                    f"the step turns {path} from {static.dtype} {list(static.shape)} into {new.dtype} "
                    f"{list(new.shape)}, and a captured step has one shape"
                )
            static.copy_(new.detach())
            attributes[name] = static

    @contextmanager
    def metrics_kept(self) -> Iterator[None]:
        """Within, running a step leaves the metrics' counts as they are."""
        counts = [metric._update_count for metric in self._metrics]
        try:
            yield
        finally:
            for metric, count in zip(self._metrics, counts, strict=True):
                vars(metric)["_update_count"] = count

    def count_updates(self) -> None:
        """Count a replay's updates, so that each metric computes its value anew when asked."""
        for attributes, updates in self._updates:
            attributes["_update_count"] += updates
            attributes["_computed"] = None

    def _place(self, path: str) -> tuple[dict[str, Any], str]:
        owner, _, name = path.rpartition(".")
        module = self.module.get_submodule(owner)
        return (module._buffers if name in module._buffers else vars(module)), name

    def _refuse_host(self, path: str, tensor: Tensor) -> None:
        device = next((parameter.device for parameter in self.module.parameters()), tensor.device)
        if tensor.device.type != device.type:
            raise OptimizationError(
                f"the step writes to {path}, which lies on the {tensor.device.type}, where a replay would not write; "
                "make it a buffer (register_buffer), or write to it in on_train_batch_end"
            )

    def _is_cache(self, path: str) -> bool:
        """Whether a path is a metric's last value, and none of its states."""
        owner, _, name = path.rpartition(".")
        module = self.module.get_submodule(owner)
        return isinstance(module, Metric) and name not in module._defaults

    def _list_lengths(self) -> dict[str, int]:
        return {
            f"{type(metric).__name__}.{name}": len(value)
            for metric in self._metrics
            for name in metric._defaults
            if isinstance(value := getattr(metric, name), list)
        }


def hanging_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return path -> tensor of those that a module and its trainer's callbacks reach through containers and objects.

    Left out are the module's own parameters, buffers and attributes, and what libraries' objects hold.
    """
    own = (*module.parameters(), *module.buffers(), *tensor_attributes(module).values())
    trainer: Any = getattr(module, "_trainer", None)
    left = [(type(callback).__name__, callback) for callback in (trainer.callbacks if trainer is not None else ())]
    left += [(path, value) for path, owner, _, value in own_attributes(module) if not isinstance(owner, Metric)]
    seen = {id(each) for each in (*own, *module.modules())}
    found: dict[str, Tensor] = {}
    for _ in range(MOST_LOOKED_AT):
        if not left:
            break
        path, value = left.pop()
        if isinstance(value, PLAIN) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            found[path] = value
        else:
            left += _parts(path, value)
    return found


def _parts(path: str, value: Any) -> Iterable[tuple[str, Any]]:
    """Return the parts of a container or an object that may hold tensors, with their paths."""
    if isinstance(value, nn.Module):
        return [(f"{path}.{name}", t) for name, t in (*value.named_parameters(), *value.named_buffers())]
    if isinstance(value, (Mapping, list, tuple, set, deque)):
        if len(value) > MOST_LOOKED_AT:
            return []
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        return [(f"{path}[{key!r}]", item) for key, item in items]
    package = type(value).__module__
    if package.split(".")[0] in LIBRARIES or package.startswith("fasttrain.callbacks."):
        return []
    return [(f"{path}.{name}", item) for name, item in getattr(value, "__dict__", {}).items()]


def _mark(tensor: Tensor) -> tuple[int, float]:
    """Return what tells whether a tensor has been written to since: a write through `.data` counts no version."""
    version = 0 if tensor.is_inference() else tensor._version
    if tensor.layout is not torch.strided or tensor.is_complex() or tensor.is_meta or tensor.is_quantized:
        return version, 0.0
    total = float(tensor.detach().sum(dtype=torch.float64))
    return version, total if total == total else 0.0
