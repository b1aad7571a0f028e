"""A second stream for work that nobody waits for until the end.

The matrix products of a small batch fill only a part of a large GPU: 6,912 x 512 outputs are 108 tiles of 128 x 256
for an H200's 132 multiprocessors. A data gradient and a weight gradient don't depend on each other, and two streams
run them together. NVIDIA's DLRM of MLPerf Training v2.0 does the same (HugeCTR's `async_mlp_wgrad`).
"""

from collections.abc import Callable
from functools import cache
from types import TracebackType

import torch
from torch import Tensor


class Beside:
    """Runs calls on a second stream of a device, and lets the current stream wait for them when the block is left.

    In a CUDA graph this becomes a branch. Off a GPU, or if not wanted, calls are made in line.
    """

    def __init__(self, device: torch.device, wanted: bool = True) -> None:
        self._on = wanted and device.type == "cuda"
        self._held: list[tuple[Tensor, ...]] = []
        if self._on:
            self._main, self._side = torch.cuda.current_stream(device), _side_stream(device)

    def __enter__(self) -> "Beside":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._on:
            self._main.wait_stream(self._side)
        self._held.clear()

    def ready(self) -> torch.cuda.Event | None:
        """Return a mark behind all that the current stream has been given so far."""
        return self._main.record_event() if self._on else None

    def __call__(self, call: Callable[[], object], *tensors: Tensor, after: torch.cuda.Event | None = None) -> None:
        """Make a call after all that the current stream has been given so far, or `after` a mark.

        Args:
            call: must write into tensors made before the mark; what it makes itself must not leave it.
            tensors: what it reads and writes, kept until the block is left. So no memory is given to others, on either
                stream, while the second stream may use it.
            after: of `ready`.
        """
        if not self._on:
            call()
            return
        self._side.wait_event(after or self._main.record_event())
        self._held.append(tensors)
        with torch.cuda.stream(self._side):
            call()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
