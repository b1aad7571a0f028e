"""Weight gradients on streams beside the one of the data gradients.

Nothing waits for a weight gradient but the optimizer, and in a network's last stages one alone has too few programs
to fill a GPU. So the chain of data gradients is launched first, and each weight gradient, on a side stream, begins
when its operands are there. Source: NVIDIA's Mask R-CNN of MLPerf Training v2.0, by block (Apex).
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from fasttrain.callbacks.bottleneck.convolution import weight_gradient
from fasttrain.callbacks.bottleneck.operators import Geometry, Operators

# What a weight's gradient is to look like.
Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


class WeightGradients:
    """Those of one stage's backward. With no side streams each is computed at once, and its operands can be freed."""

    def __init__(self, operators: Operators, device: torch.device, side_streams: int) -> None:
        self.operators, self.device = operators, device
        self._streams = streams_beside(device, side_streams)
        self._waiting: list[tuple[torch.cuda.Event, Callable[[], None]]] = []

    def add(self, g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, scale: Tensor, layout: Layout) -> Tensor:
        """Return the gradient of an unscaled weight, which has its values after `join`.

        Args:
            g: gradient of the convolution's output.
            x: its input.
            weight: the scaled weight.
            geometry: of the convolution.
            scale: of its output channels.
            layout: of the unscaled weight.
        """
        size, stride, dtype = layout
        # From the main stream's memory, because that is where it will be read and freed.
        dw = torch.empty_strided(size, stride, dtype=dtype, device=self.device)

        def compute() -> None:
            self.operators.scale(weight_gradient(g, x, weight, geometry), scale, dw)

        if not self._streams:
            compute()
        else:
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self.device))
            self._waiting.append((ready, compute))
        return dw

    def join(self) -> None:
        """Launch what is waiting, and let the main stream wait for it. Until then all operands are held."""
        if not self._waiting:
            return
        main = torch.cuda.current_stream(self.device)
        for number, (ready, compute) in enumerate(self._waiting):
            stream = self._streams[number % len(self._streams)]
            stream.wait_event(ready)
            with torch.cuda.stream(stream):
                compute()
        for stream in self._streams[: len(self._waiting)]:
            main.wait_stream(stream)
        self._waiting.clear()


@cache
def streams_beside(device: torch.device, count: int) -> tuple[torch.cuda.Stream, ...]:
    """Return that many streams, the same ones each time; none for a CPU."""
    return tuple(torch.cuda.Stream(device) for _ in range(count)) if device.type == "cuda" else ()
