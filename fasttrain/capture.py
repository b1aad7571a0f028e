"""Capturing a function as a CUDA graph, and undoing what torch leaves behind when that fails."""

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch


def captured(call: Callable[[], Any], warmup: int = 3) -> Callable[[], None]:
    """Return what replays `call` as a CUDA graph on the current device, captured after some calls on a side stream.

    Raises:
        Exception: what the call raised, or what CUDA refused, a synchronization for instance. The device is then as it
            was before.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.graph(graph, pool=pool):
            call()
    except BaseException:
        clear_broken_capture(stream.device, pool)
        raise

    def replay(call: Callable[[], Any] = call) -> None:  # holds what the graph reads and writes
        graph.replay()

    return replay


def clear_broken_capture(device: torch.device, pool: Any) -> None:
    """Undo what torch leaves behind when CUDA has invalidated a capture into a memory pool.

    `CUDAGraph::capture_end` (torch 2.11 to 2.14) raises before it closes the memory pool and tells the generator that
    the capture is over; random numbers would fail from then on ("Offset increment outside graph capture"). A capture of
    nothing tells it. Neither the pool nor the stream of the capture may be used again.
    """
    torch.cuda.synchronize(device)
    with suppress(RuntimeError, AttributeError):  # closed already, where the function itself raised
        torch._C._cuda_endAllocateToPool(device.index or 0, pool)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the graph is empty
        empty = torch.cuda.graph(
            torch.cuda.CUDAGraph(), stream=torch.cuda.Stream(device), capture_error_mode="thread_local"
        )
        with empty:
            pass
