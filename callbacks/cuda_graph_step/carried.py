"""State that a step carries to the next one in attributes that it sets anew: `self.ema = 0.9 * self.ema + 0.1 * x`.

A replay runs kernels, not assignments: the attribute would go on holding the tensor of the capture, and the next replay
would read the old one (pytorch/pytorch#114844). Here each such attribute gets one static tensor; at the end of the
step its new value is copied there, inside the graph, and the attribute holds the static tensor again. States of
torchmetrics are of this kind; their counts of updates, which are Python numbers, are kept beside.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from fasttrain.callbacks.cuda_graph_step.host_state import tensor_attributes
from fasttrain.errors import OptimizationError


class CarriedState:
    """The tensors that a module's step sets anew, by path, and the metrics that it updates."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.static: dict[str, Tensor] = {}
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        self._metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
        self._updates: list[tuple[dict[str, Any], int]] = []
        """Attributes of each metric that the step updates, and its updates a step."""

    def before(self) -> None:
        """Note the state before an eager step, from which `after` learns what the step sets anew."""
        self._tensors, self._lengths = tensor_attributes(self.module), self._list_lengths()
        self._versions = {path: _version(tensor) for path, tensor in self._tensors.items()}
        self._counts = [metric._update_count for metric in self._metrics]

    def after(self) -> None:
        """Compare with the state after it.

        Raises:
            OptimizationError: a metric keeps a list that grows with every step.
        """
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        for path, tensor in tensor_attributes(self.module).items():
            changes = path in self._tensors and (
                tensor is not self._tensors[path]
                # Changed in place, it stays where it is until somebody resets it to another; buffers are watched.
                or (path not in buffers and _version(tensor) != self._versions[path])
            )
            if changes and path not in self.static and not self._is_cache(path):
                self.static[path] = tensor.detach().clone()
                self._places[path] = self._place(path)
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
        self._tensors = {}

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


def _version(tensor: Tensor) -> int:
    """Return how often a tensor has been written to in place."""
    return 0 if tensor.is_inference() else tensor._version
