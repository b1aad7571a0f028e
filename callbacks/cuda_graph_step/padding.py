"""Inputs padded to a few sizes, so that as many graphs serve every length."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from fasttrain.batches import map_tensors, named_tensors
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
            OptimizationError: a name is not in the batch, or its tensor lacks the dimension.
        """
        if not self.is_on():
            return batch
        places = [place for place, _ in named_tensors(batch)]
        for name in self.values:
            if name not in places:
                raise OptimizationError(
                    f"cuda_graph_step.pad.values names '{name}', which is not in the batch; {nearest(name, places)}"
                )
        left = iter(places)
        return map_tensors(batch, lambda tensor: self._pad_at(next(left), tensor))

    def _pad_at(self, place: str, tensor: Tensor) -> Tensor:
        if place not in self.values:
            return tensor
        if not -tensor.dim() <= self.dimension < tensor.dim():
            raise OptimizationError(
                f"cuda_graph_step.pad.dimension is {self.dimension}, and '{place}' has the shape "
                f"{list(tensor.shape)}; leave it out of pad.values, or name a dimension that all of them have."
            )
        return self._pad(tensor, self.values[place])

    def _pad(self, tensor: Tensor, filling: float) -> Tensor:
        dimension = self.dimension % tensor.dim()
        length = tensor.shape[dimension]
        size = next((size for size in self.sizes if size >= length), length)
        after = [0, 0] * (tensor.dim() - 1 - dimension)
        return pad(tensor, [*after, 0, size - length], value=filling) if size > length else tensor
