"""`DALILoader`: a loader as Lightning wants one, whose batches DALI makes.

Which samples are in a batch is settled by `EpochOrder`, the torch loader's own sampler, and everything random by the
graph on the host, so a batch is a function of its keys. DALI decodes and transforms what it is fed, and has no readers
and no epochs of its own that could count otherwise than the Trainer does.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import torch

from fasttrain.callbacks.dali_loader.config import DALIConfig, require_dali
from fasttrain.callbacks.dali_loader.encoded import EncodedSamples
from fasttrain.callbacks.dali_loader.graph import LoaderGraph
from fasttrain.callbacks.dali_loader.pipeline import Batch, GraphPipeline
from fasttrain.callbacks.dali_loader.reading import HostBatch, Keys, ReadAhead
from fasttrain.callbacks.dali_loader.recovery import refused_samples, reject
from fasttrain.order import EpochOrder, Resumable


class DALILoader(Resumable):
    """Batches, dicts of tensors by the names of the graph's outputs, on a device.

    Pipeline and threads are made by the first pass and kept for the next; `close` frees them until there is another.
    One pass at a time: a second ends the first.

    Args:
        samples: encoded, in any container. If it has `reject` (see `usable.ReplacesBad`), it is told of what the
            decoder refuses; otherwise that is an error, naming the file.
        graph: of the task. It is asked for a batch's parameters after the batch's samples were read.
        order: the sampler; set_epoch on it chooses the order of the next pass.
        batch_size: samples in a batch.
        drop_last: leave out a last partial batch; otherwise it comes as small as it is, with no sample twice.
        device: where batches are to be; a Trainer's `strategy.root_device`.
        config: threads, prefetching, memory.
        casts: dtypes that outputs are given, by name.

    Raises:
        MissingDependencyError: DALI isn't installed.
    """

    batch_size: int
    batch_sampler = None  # Lightning looks here first for the sampler

    def __init__(
        self,
        samples: EncodedSamples,
        graph: LoaderGraph,
        order: EpochOrder,
        batch_size: int,
        *,
        drop_last: bool = False,
        device: torch.device | str = "cpu",
        config: DALIConfig | None = None,
        casts: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        require_dali()
        self.samples, self.graph = samples, graph
        self.order = self.sampler = order
        self.batch_size, self.drop_last, self.device = batch_size, drop_last, torch.device(device)
        self.config = config or DALIConfig()
        self._casts = casts
        self._open = _Open(self._new_pipeline)
        self._finalizer = weakref.finalize(self, self._open.close)

    def __len__(self) -> int:
        whole, rest = divmod(len(self.order), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        self.begin_pass()
        this = self._open.begin(self.config.readers)
        reading = ReadAhead(self._keys(), self._read, self._open.pool, self.config.readers)
        try:
            while (batch := self._next(reading)) is not None:
                self.batches_served += 1
                yield batch
                if self._open.number != this:
                    raise RuntimeError("this pass over a DALI loader was ended, by another pass or by close().")
        finally:
            reading.cancel()
            self._open.end(this)

    def close(self) -> None:
        """Free the pipeline, its memory and the threads. A later pass makes them anew."""
        self._open.close()

    def _keys(self) -> Iterator[Keys]:
        keys = iter(self.order)
        while batch := list(islice(keys, self.batch_size)):
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch

    def _read(self, keys: Keys) -> HostBatch:
        encoded = [self.samples.read(key.index) for key in keys]
        return HostBatch(keys, encoded, self.graph.parameters(keys))

    def _next(self, reading: ReadAhead) -> Batch | None:
        """Return the next batch; what is wrong with its samples is raised when it is its turn, and not before."""
        pipeline = self._open.pipeline
        while len(pipeline.held) < self.config.prefetch and (reading.is_ready() or not pipeline.held):
            host = reading.take()
            if host is None:
                break
            try:
                pipeline.feed(host)
            except RuntimeError:
                return self._take_alone(reading)
        if not pipeline.held:
            return None
        try:
            return pipeline.take()
        except RuntimeError:
            return self._take_alone(reading)

    def _take_alone(self, reading: ReadAhead) -> Batch:
        """Return the oldest batch, which or one behind which DALI failed at; those behind it are fed again later."""
        first, *others = self._open.pipeline.held
        self._open.drop_pipeline()
        reading.put_back(others)
        while True:
            refused = refused_samples(first, self._one_at_a_time)
            if refused:
                reject(self.samples, refused)
                first = self._read(first.keys)
            try:
                self._open.pipeline.feed(first)
                return self._open.pipeline.take()
            except RuntimeError:
                self._open.drop_pipeline()
                if not refused:  # each of its samples can be decoded, and still it fails: it is something else
                    raise

    def _new_pipeline(self) -> GraphPipeline:
        return GraphPipeline(self.graph, self.batch_size, self.device, self.config, self._casts)

    def _one_at_a_time(self) -> GraphPipeline:
        return GraphPipeline(self.graph, 1, self.device, self.config, self._casts)


class _Open:
    """What a loader holds while it is in use: a pipeline, threads, and the number of the pass that uses them."""

    def __init__(self, make: Callable[[], GraphPipeline]) -> None:
        self._make: Any = weakref.WeakMethod(make)  # a finalizer may not keep its loader
        self._pipeline: GraphPipeline | None = None
        self._pool: ThreadPoolExecutor | None = None
        self.number = 0

    @property
    def pipeline(self) -> GraphPipeline:
        if self._pipeline is None:
            self._pipeline = self._make()()
        return self._pipeline

    @property
    def pool(self) -> ThreadPoolExecutor:
        assert self._pool is not None
        return self._pool

    def begin(self, threads: int) -> int:
        """Return the number of a new pass, which finds the pipeline empty."""
        self.number += 1
        self._drain()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="dali-read")
        return self.number

    def end(self, number: int) -> None:
        if number == self.number:
            self._drain()

    def drop_pipeline(self) -> None:
        self._pipeline = None

    def close(self) -> None:
        self.number += 1
        self._pipeline = None
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def _drain(self) -> None:
        try:
            if self._pipeline is not None:
                self._pipeline.drain()
        except RuntimeError:  # a batch that nobody waits for can't be decoded; whoever asks for it will be told
            self._pipeline = None
