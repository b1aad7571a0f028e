"""Device memory that is written again and again: who gets it, and when it may be overwritten."""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from fasttrain.callbacks.device_prefetch.streams import Mark, Streams

KINDS = 16
"""Kinds of tensors whose memory is kept; that of the kind unused for longest goes. A batch of ragged parts has many."""

HELD = 4
"""Buffers of a kind that somebody outside may hold before they are left to him."""


@dataclass(frozen=True)
class Kind:
    """What tensors have in common that may take turns in the same memory."""

    shape: torch.Size
    source_stride: tuple[int, ...]
    source_dtype: torch.dtype
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_copied_straight(self) -> bool:
        """Whether a tensor arrives as it is to be, so that no second pass on the device changes it."""
        return (self.source_stride, self.source_dtype) == (self.stride, self.dtype)


class Buffer:
    """One tensor's place on the device, with what has to happen before it is written again."""

    def __init__(self, kind: Kind, tensor: Tensor) -> None:
        self.kind, self.tensor = kind, tensor
        self.staging: Tensor | None = None
        """Pinned host memory of the same kind, for sources that are not."""
        self.source: Tensor | None = None
        """What is being copied from: kept until that is done."""
        self.written: Mark | None = None
        self.used: Mark | None = None
        self.is_new = True
        self._uses = _uses(tensor)

    @property
    def is_held(self) -> bool:
        """Whether a tensor somewhere shares this memory: a batch that a callback keeps, or a view of it."""
        return _uses(self.tensor) > self._uses


class BufferPool:
    """Hands out buffers by kind. Taking and giving back may happen in two threads."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.made = 0
        """Buffers that were allocated."""
        self.left = 0
        """Of these, left to somebody who still held them when they were wanted again."""
        self._free: OrderedDict[Kind, deque[Buffer]] = OrderedDict()
        self._landings: dict[Kind, Tensor] = {}
        self._lock = Lock()

    def take(self, kind: Kind) -> Buffer:
        """Return a buffer that the side stream may write after `used`, and the host's source after `written`."""
        with self._lock:
            free = self._free.setdefault(kind, deque())
            self._free.move_to_end(kind)
            self._forget_old_kinds()
            found = next((buffer for buffer in free if not buffer.is_held), None)
            if found is not None:
                free.remove(found)
            elif len(free) >= HELD:
                _finish(free.popleft())
                self.left += 1
        if found is None:
            found = Buffer(kind, self.streams.empty(kind.shape, kind.stride, kind.dtype))
            self.made += 1
        return found

    def landing(self, kind: Kind) -> Tensor:
        """Return where tensors arrive that a second pass changes. One will do: the side stream works in order."""
        if kind not in self._landings:
            self._landings[kind] = self.streams.empty(kind.shape, kind.source_stride, kind.source_dtype)
        return self._landings[kind]

    def give_back(self, buffers: Iterable[Buffer], used: Mark) -> None:
        """Take buffers back that the step's stream reads until `used`."""
        with self._lock:
            for buffer in buffers:
                buffer.used = used
                self._free.setdefault(buffer.kind, deque()).append(buffer)

    def _forget_old_kinds(self) -> None:
        while len(self._free) > KINDS:
            kind, buffers = self._free.popitem(last=False)
            self._landings.pop(kind, None)
            for buffer in buffers:
                _finish(buffer)


def _finish(buffer: Buffer) -> None:
    """Let go of host memory only when it has been copied from. Device memory is the allocator's business."""
    if buffer.written is not None:
        buffer.written.synchronize()


def _uses(tensor: Tensor) -> int:
    # Of the storage, since views and tensors saved for a backward have no other trace in Python.
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
