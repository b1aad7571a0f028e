"""The weights of a stage, scaled and rounded on a side stream while its first blocks run already.

Each is a kernel of a few microseconds, and a stage has a dozen or two of them, which the main stream need not wait for.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fasttrain.callbacks.bottleneck.operators import Operators
from fasttrain.callbacks.bottleneck.weight_gradients import streams_beside


class ScaledWeights:
    """weight * scale by output channel, rounded once, channels_last: by block, in the order in which they are used.

    Args:
        operators: the tier that scales.
        weights: of each block.
        scales: of their output channels.
        dtype: of the maps.
        side_streams: 0 to scale them at once, on the main stream.
    """

    def __init__(
        self, operators: Operators, weights: Sequence[Sequence[Tensor]], scales: Sequence[Sequence[Tensor]],
        dtype: torch.dtype, side_streams: int,
    ) -> None:  # fmt: skip
        # From the main stream's memory, because that is where they will be read and freed.
        self._scaled = [tuple(_empty(weight, dtype) for weight in block) for block in weights]
        self._device = weights[0][0].device
        self._ready: list[torch.cuda.Event] = []
        streams = streams_beside(self._device, side_streams)
        if not streams:
            for block, block_scales, scaled in zip(weights, scales, self._scaled, strict=True):
                _scale(operators, block, block_scales, scaled)
            return
        streams[0].wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(streams[0]):
            for block, block_scales, scaled in zip(weights, scales, self._scaled, strict=True):
                _scale(operators, block, block_scales, scaled)
                self._ready.append(torch.cuda.Event())
                self._ready[-1].record(streams[0])

    def __getitem__(self, block: int) -> tuple[Tensor, ...]:
        """Return a block's weights; the main stream waits for them. To be called once for every block."""
        if self._ready:
            torch.cuda.current_stream(self._device).wait_event(self._ready[block])
        return self._scaled[block]


def _empty(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(weight, dtype=dtype, memory_format=torch.channels_last)


def _scale(operators: Operators, weights: Sequence[Tensor], scales: Sequence[Tensor], scaled: Sequence[Tensor]) -> None:
    for weight, scale, out in zip(weights, scales, scaled, strict=True):
        operators.scale(weight, scale, out)
