"""A DALI pipeline that is fed by hand: built from a task's graph, fed host batches, giving torch batches in order."""

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from fasttrain.callbacks.dali_loader.config import DALIConfig
from fasttrain.callbacks.dali_loader.graph import Device, LoaderGraph
from fasttrain.callbacks.dali_loader.reading import HostBatch
from fasttrain.forks import keep_what_children_inherit

ENCODED, PARAMETER = "encoded", "parameter:"
MIB = 2**20
Batch = dict[str, Tensor]


class GraphPipeline:
    """One pipeline and the batches in it.

    Args:
        graph: of the task.
        batch_size: most samples of a batch; any batch may have fewer.
        device: where batches are to be. Without an index, "cuda" is the current device.
        config: threads, depth and memory.
        casts: dtypes that outputs get on the way, by name, bfloat16 for instance, which DALI lacks.
    """

    def __init__(
        self,
        graph: LoaderGraph,
        batch_size: int,
        device: torch.device,
        config: DALIConfig,
        casts: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        keep_what_children_inherit()  # pipelines: they'd wait for threads that a child doesn't have
        self.device, self.casts = device, dict(casts or {})
        self.names: list[str] = []
        self.held: deque[HostBatch] = deque()
        """Batches that were fed and not taken, whose bytes DALI reads where they lie."""
        self._batch_size, self._depth, self._runs = batch_size, config.prefetch, False
        # DALI reads bytes where they lie, and outputs that are bound to a stream come before the device is done.
        self._taken: deque[HostBatch] = deque(maxlen=config.prefetch)
        self._pipe = self._define(graph, batch_size, config)
        if device.type == "cuda":
            _preallocate(self._pipe.device_id, config)

    def feed(self, batch: HostBatch) -> None:
        """Have a batch worked on; it does not wait for those before it to be taken.

        Raises:
            RuntimeError: DALI can't decode a sample of it or of one before it; the pipeline is of no more use.
        """
        self.held.append(batch)
        if not self._runs:
            self._start(batch)
        self._feed(batch)
        self._pipe.schedule_run()

    def take(self) -> Batch:
        """Return the oldest batch that was fed, without waiting for the device.

        On a GPU the tensors are ready in the order of torch's current stream and are torch's own memory, so any use
        that is right for other tensors is right for these. Images come as (B, C, H, W) in channels_last.

        Raises:
            RuntimeError: DALI can't decode a sample of this or a later batch; the pipeline is of no more use.
        """
        outputs = self._outputs()
        batch = {
            name: self._to_torch(output, self.casts.get(name)) for name, output in zip(self.names, outputs, strict=True)
        }
        self._taken.append(self.held.popleft())
        return batch

    def drain(self) -> None:
        """Throw away what was fed and not taken."""
        while self.held:
            self._outputs()
            self._taken.append(self.held.popleft())

    def _define(self, graph: LoaderGraph, batch_size: int, config: DALIConfig) -> Any:
        from nvidia.dali import Pipeline, fn

        on_gpu = self.device.type == "cuda"
        device_id = None
        if on_gpu:
            device_id = torch.cuda.current_device() if self.device.index is None else self.device.index
        pipe = Pipeline(batch_size, config.threads, device_id, prefetch_queue_depth=config.prefetch)
        with pipe:
            encoded = fn.external_source(name=ENCODED, dtype=_dali_type(np.dtype(np.uint8)), ndim=1, no_copy=True)
            parameters = {
                name: fn.external_source(name=PARAMETER + name, dtype=_dali_type(example.dtype), ndim=example.ndim - 1)
                for name, example in graph.parameters(()).items()
            }
            outputs = graph.outputs(encoded, parameters, device_name(self.device))
            self.names = list(outputs)
            pipe.set_outputs(*outputs.values())
        return pipe

    def _feed(self, batch: HostBatch) -> None:
        self._pipe.feed_input(ENCODED, batch.encoded)
        for name, values in batch.parameters.items():
            self._pipe.feed_input(PARAMETER + name, np.ascontiguousarray(values))

    def _start(self, batch: HostBatch) -> None:
        """Run this batch some times for nothing: the first `schedule_run` wants as many as the pipeline is deep.

        Whole batches: the decoder (nvImageCodec 0.9) divides its work by the first that it sees, and doesn't think
        again. After a first batch of one image, later ones of 32 took three times as long.
        """
        first = batch.filled(self._batch_size)
        for _ in range(self._depth):
            self._feed(first)
        self._pipe.schedule_run()
        for _ in range(self._depth):
            self._outputs()
        self._runs = True

    def _outputs(self) -> Any:
        if self.device.type == "cuda":
            return self._pipe.outputs(torch.cuda.current_stream(self._pipe.device_id))
        return self._pipe.outputs()

    def _to_torch(self, output: Any, dtype: torch.dtype | None) -> Tensor:
        tensor = from_dlpack(output.as_tensor())
        if output.layout() == "HWC":
            tensor = tensor.permute(0, 3, 1, 2)
        if self.device.type == "cuda":
            # DALI's memory goes back to its pool in the order of this stream, whoever else may read it: so it is not
            # handed out. The copy of 32 images of 800 x 800 moves 120 MB, a few hundredths of a millisecond.
            return tensor.to(dtype=dtype or tensor.dtype, copy=True)
        return tensor if dtype is None else tensor.to(dtype)


def device_name(device: torch.device) -> Device:
    """Return a device as graphs know it."""
    return "gpu" if device.type == "cuda" else "cpu"


def _dali_type(dtype: np.dtype[Any]) -> Any:
    from nvidia.dali import types

    return types.to_dali_type(dtype.name)


def _preallocate(device_id: int, config: DALIConfig) -> None:
    from nvidia.dali import backend

    pools: Any = backend
    if config.device_memory_mb:
        pools.PreallocateDeviceMemory(config.device_memory_mb * MIB, device_id)
    if config.host_memory_mb:
        pools.PreallocatePinnedMemory(config.host_memory_mb * MIB)
