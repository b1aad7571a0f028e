"""The device call: record a function's kernels once and launch them again as one graph; and its stand-in for a CPU.

Everything else in this room is bookkeeping, written against `Recorder` and `Recording`, so that the stand-in, which
really runs the function again, tests it where there is no GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from fasttrain.batches import map_tensors, tensors_in
from fasttrain.capture import clear_broken_capture
from fasttrain.forks import keep_what_children_inherit

Function = Callable[[], Any]


class Recording(Protocol):
    """One recorded function. Its outputs lie at fixed addresses, and hold what the last replay computed."""

    @property
    def outputs(self) -> Any:
        """What the function returned; the tensors in it are static. Known after the first replay."""

    def replay(self) -> None:
        """Do the function's device work again, on whatever its static inputs hold now."""

    def release(self) -> None:
        """Give the memory back; not to be replayed any more."""


class Recorder(Protocol):
    """Records functions, all into one memory pool."""

    def warm_up(self) -> AbstractContextManager[Any]:
        """Run what a later recording repeats in here: on the same stream, where memory and libraries get ready."""

    def record(self, function: Function) -> Recording:
        """Return the recording of a function, without its having changed anything on the device."""

    def trim(self) -> None:
        """Give memory that no tensor uses back to the device."""

    def random_state(self) -> Tensor | None:
        """Return the state of the device's random numbers."""

    def set_random_state(self, state: Tensor | None) -> None:
        """Put back what `random_state` returned."""


class CudaRecording:
    """A CUDA graph and the outputs that its capture returned."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Any) -> None:
        self.graph: torch.cuda.CUDAGraph | None = graph
        self.outputs = outputs
        self.replay = graph.replay  # bound once: this is called at every step

    def release(self) -> None:
        """Free the graph. Its memory stays in the pool for later captures, and is returned with the pool."""
        if self.graph is not None:
            del self.replay
            self.outputs = None
            self.graph.reset()
            self.graph = None


class CudaRecorder:
    """Captures on one side stream into one memory pool.

    Graphs that share a pool may overwrite each other's intermediates, which is right as long as one replay follows
    another, as steps do. What outlives a replay is held by a reference and is not given to another graph.

    Captures in thread-local mode: a loader's pinning thread makes CUDA calls meanwhile, and in global mode these would
    end the capture (pytorch/pytorch#146924).
    """

    def __init__(self, device: torch.device) -> None:
        keep_what_children_inherit()  # graphs that are no more, in cycles
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """Run on the side stream, after what the current stream was given, and let that wait for it in turn."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            yield
        current.wait_stream(self.stream)

    def record(self, function: Function) -> CudaRecording:
        """Capture the function's kernels; none of them runs.

        Raises:
            Exception: what the function raised, or what CUDA refused, for instance a synchronization.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                outputs = function()
        except BaseException:
            clear_broken_capture(self.device, self.pool)
            self.pool = torch.cuda.graph_pool_handle()
            self.stream = torch.cuda.Stream(self.device)
            raise
        return CudaRecording(graph, outputs)

    def trim(self) -> None:
        """Return what eager steps and checks have left in the allocator's cache; graphs keep theirs."""
        torch.cuda.empty_cache()

    def random_state(self) -> Tensor:
        """Return the generator's seed and offset."""
        return torch.cuda.get_rng_state(self.device)

    def set_random_state(self, state: Tensor | None) -> None:
        """Set the generator's seed and offset."""
        if state is not None:
            torch.cuda.set_rng_state(state, self.device)


class Reexecution:
    """The stand-in's recording: replaying runs the function again and copies its outputs to where they were first."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.outputs: Any = None

    def replay(self) -> None:
        """Run the function."""
        outputs = self.function()
        if self.outputs is None:
            self.outputs = map_tensors(outputs, lambda tensor: tensor.detach().clone())
            return
        for static, new in zip(tensors_in(self.outputs), tensors_in(outputs), strict=True):
            static.copy_(new.detach())

    def release(self) -> None:
        """Forget the function."""
        self.outputs = None


class EagerRecorder:
    """The stand-in for a device without graphs."""

    def warm_up(self) -> AbstractContextManager[None]:
        """There is no stream to choose."""
        return nullcontext()

    def record(self, function: Function) -> Reexecution:
        """Keep the function."""
        return Reexecution(function)

    def trim(self) -> None:
        """There is no cache."""

    def random_state(self) -> Tensor:
        """Return the state of the CPU's generator."""
        return torch.get_rng_state()

    def set_random_state(self, state: Tensor | None) -> None:
        """Set it."""
        if state is not None:
            torch.set_rng_state(state)


def recorder_for(device: torch.device) -> Recorder:
    """Return the recorder of a device: graphs on CUDA, the stand-in elsewhere."""
    return CudaRecorder(device) if device.type == "cuda" else EagerRecorder()
