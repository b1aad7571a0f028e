"""Inputs padded to a few sizes, so that as many graphs serve every length."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from fasttrain.callbacks.cuda_graph_step.config import PadConfig
from fasttrain.errors import ConfigError, OptimizationError, nearest


class PadToSizes:
    """Pads named tensors of a batch at the end of one dimension.

    Args:
        config: which, to what, with what.
        is_on: asked at each batch; batches of an evaluation are left alone.

    Raises:
        ConfigError: no sizes, no inputs, or a size that is not positive.
    """

    def __init__(self, config: PadConfig, is_on: Callable[[], bool]) -> None:
        if not config.sizes or not config.values or min(config.sizes) <= 0:
            raise ConfigError(
                "optimizations.cuda_graph_step.pad needs `sizes`, like [128, 256, 512], and `values`, like "
                f"{{input_ids: 0, labels: -100}}; it has sizes {list(config.sizes)} and values {dict(config.values)}."
            )
        self.sizes, self.values, self.dimension = sorted(config.sizes), dict(config.values), config.dimension
        self.is_on = is_on

    def __call__(self, batch: Any) -> Any:
        """Return the batch with the named tensors padded.

        Raises:
            OptimizationError: a name is not in the batch.
        """
        if not self.is_on():
            return batch
        left = dict(self.values)
        places: list[str] = []
        padded = self._walk(batch, "", left, places)
        if left:
            name = next(iter(left))
            raise OptimizationError(
                f"cuda_graph_step.pad.values names '{name}', which is not in the batch; {nearest(name, places)}"
            )
        return padded

    def _walk(self, value: Any, place: str, left: dict[str, float], places: list[str]) -> Any:
        if isinstance(value, Tensor):
            places.append(place)
            return self._pad(value, left.pop(place)) if place in left else value
        if isinstance(value, Mapping):
            made = {key: self._walk(item, _join(place, key), left, places) for key, item in value.items()}
            return made if type(value) is dict else type(value)(made)  # type: ignore[call-arg]
        if isinstance(value, (list, tuple)):
            items = [self._walk(item, _join(place, index), left, places) for index, item in enumerate(value)]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value

    def _pad(self, tensor: Tensor, filling: float) -> Tensor:
        dimension = self.dimension % tensor.dim()
        length = tensor.shape[dimension]
        size = next((size for size in self.sizes if size >= length), length)
        after = [0, 0] * (tensor.dim() - 1 - dimension)
        return pad(tensor, [*after, 0, size - length], value=filling) if size > length else tensor


def _join(place: str, key: object) -> str:
    return f"{place}.{key}" if place else str(key)
