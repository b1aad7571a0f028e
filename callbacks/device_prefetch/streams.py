"""The device calls: a stream beside the step's, marks on both, and memory; and a stand-in where all is done at once."""

from collections.abc import Callable
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor

from fasttrain.forks import keep_what_children_inherit

T = TypeVar("T")


class Mark(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> object:
        """Have the host wait until the stream has come there."""


class Streams(Protocol):
    """The stream on which the step runs, and one beside it. Work on either is queued, not awaited."""

    device: torch.device

    def empty(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory on the device, for the side stream to write."""

    def pinned(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return host memory from which a copy need not be waited for."""

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a host tensor lies in such memory."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy on the side stream."""

    def beside(self, work: Callable[[], T]) -> T:
        """Call a function whose device work is queued on the side stream."""

    def mark_side(self) -> Mark:
        """Mark where the side stream's queue ends now."""

    def mark_step(self) -> Mark:
        """Mark where the queue of the step's stream ends now. To be called by the thread that steps."""

    def side_waits(self, mark: Mark) -> None:
        """Have the side stream's later work wait for a mark."""

    def step_waits(self, mark: Mark) -> None:
        """Have the step's later work wait for a mark. To be called by the thread that steps."""

    def used_by_step(self, tensor: Tensor) -> None:
        """Keep a tensor's memory, once freed, until the step's work of that time is done."""


class CudaStreams:
    """On a CUDA device. The step's stream is the current one of the thread that steps."""

    def __init__(self, device: torch.device) -> None:
        keep_what_children_inherit()  # freeing a tensor that two streams have used records an event
        self.device = device
        self.side = torch.cuda.Stream(device)

    def empty(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory of the side stream's."""
        with torch.cuda.stream(self.side):
            return torch.empty_strided(shape, stride, dtype=dtype, device=self.device)

    def pinned(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return page-locked memory."""
        return torch.empty_strided(shape, stride, dtype=dtype, pin_memory=True)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Ask the driver."""
        return tensor.is_pinned()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue the copy."""
        with torch.cuda.stream(self.side):
            target.copy_(source, non_blocking=True)

    def beside(self, work: Callable[[], T]) -> T:
        """Call with the side stream as the current one."""
        with torch.cuda.stream(self.side):
            return work()

    def mark_side(self) -> Mark:
        """Record an event on the side stream."""
        return self._mark(self.side)

    def mark_step(self) -> Mark:
        """Record an event on the current stream."""
        return self._mark(torch.cuda.current_stream(self.device))

    def side_waits(self, mark: Mark) -> None:
        """Queue the wait; the host goes on."""
        self.side.wait_event(cast(torch.cuda.Event, mark))

    def step_waits(self, mark: Mark) -> None:
        """Queue the wait; the host goes on."""
        torch.cuda.current_stream(self.device).wait_event(cast(torch.cuda.Event, mark))

    def used_by_step(self, tensor: Tensor) -> None:
        """Tell the allocator of the current stream."""
        tensor.record_stream(torch.cuda.current_stream(self.device))

    def _mark(self, stream: torch.cuda.Stream) -> Mark:
        event = torch.cuda.Event(blocking=True)  # who waits for it sleeps
        event.record(stream)
        return event


class _Done:
    def synchronize(self) -> None: ...


class ImmediateStreams:
    """On any device, everything done when the call returns: nothing is gained, and the bookkeeping is the same."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def empty(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory."""
        return torch.empty_strided(shape, stride, dtype=dtype, device=self.device)

    def pinned(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return ordinary memory."""
        return torch.empty_strided(shape, stride, dtype=dtype)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Nothing needs to be."""
        return True

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy."""
        target.copy_(source)

    def beside(self, work: Callable[[], T]) -> T:
        """Call."""
        return work()

    def mark_side(self) -> Mark:
        """Return a point that is past."""
        return _Done()

    def mark_step(self) -> Mark:
        """Return a point that is past."""
        return _Done()

    def side_waits(self, mark: Mark) -> None:
        """Nothing to wait for."""

    def step_waits(self, mark: Mark) -> None:
        """Nothing to wait for."""

    def used_by_step(self, tensor: Tensor) -> None:
        """Nothing to tell."""
