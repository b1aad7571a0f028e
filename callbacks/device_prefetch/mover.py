"""The body: a host batch's tensors copied to the device beside the step, into memory that is used again."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fasttrain.batches import map_tensors, tensors_in
from fasttrain.callbacks.device_prefetch.buffers import Buffer, BufferPool, Kind
from fasttrain.callbacks.device_prefetch.streams import Mark, Streams

Transform = Callable[[Any], Any]

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


class Moved:
    """A batch whose tensors are on the device, or will be when the side stream has come to `ready`."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.leaves = list(tensors_in(batch))
        self.buffers: list[Buffer] = []
        self.ready: Mark | None = None
        self.prepared: Any = None
        self.is_prepared = False
        self._on_device: dict[int, tuple[Tensor, int, Tensor]] = {}

    def add(self, tensor: Tensor, on_device: Tensor, buffer: Buffer) -> None:
        """Note where a leaf was copied to."""
        self._on_device[id(tensor)] = (tensor, tensor._version, on_device)
        self.buffers.append(buffer)

    def has(self, tensor: Tensor) -> bool:
        """Whether this is a leaf that was copied."""
        return id(tensor) in self._on_device

    def on_device(self, batch: Any) -> tuple[Any, bool]:
        """Return a batch with those tensors exchanged that were copied and not changed since, and whether it is all."""
        leaves = list(tensors_in(batch))
        whole = len(leaves) == len(self.leaves) and all(
            one is other for one, other in zip(leaves, self.leaves, strict=True)
        )
        whole = whole and all(version == tensor._version for tensor, version, _ in self._on_device.values())
        return map_tensors(batch, self._exchanged), whole

    def _exchanged(self, tensor: Tensor) -> Tensor:
        host, version, on_device = self._on_device.get(id(tensor), (None, 0, tensor))
        return on_device if host is not None and host._version == version else tensor


class DeviceMover:
    """Moves batches. `move` may be called in another thread than the rest.

    Args:
        streams: the device's.
        channels_last: lay 4-d and 5-d floating-point and uint8 tensors of two or more channels out in channels_last.
        dtype: cast floating-point tensors to this; None leaves them alone.
        layouts: functions applied to batches later that change layouts alone; what they would do to a tensor by itself
            is done here.
        prepare: called with each batch on the device, on the side stream, without gradients; returns the batch to use.
    """

    def __init__(
        self,
        streams: Streams,
        channels_last: bool = False,
        dtype: torch.dtype | None = None,
        layouts: Callable[[], Sequence[Transform]] = tuple,
        prepare: Transform | None = None,
    ) -> None:
        self.streams, self.pool = streams, BufferPool(streams)
        self.channels_last, self.dtype, self.layouts, self.prepare = channels_last, dtype, layouts, prepare
        self._kinds: dict[tuple[torch.Size, tuple[int, ...], torch.dtype], Kind] = {}

    def move(self, batch: Any) -> Moved:
        """Queue the copies of a batch of any structure. Host tensors that require gradients, and others, stay."""
        moved = Moved(batch)
        for tensor in moved.leaves:
            if _can_move(tensor) and not moved.has(tensor):
                buffer = self._copy(tensor)
                moved.add(tensor, buffer.tensor.detach(), buffer)  # whoever keeps this alias shows in the use count
        if self.prepare is not None and moved.buffers:
            with torch.no_grad():
                on_device = moved.on_device(batch)[0]
                moved.prepared = self.streams.beside(lambda: self.prepare(on_device))  # type: ignore[misc]
            moved.is_prepared = True
        moved.ready = self.streams.mark_side()
        for buffer in moved.buffers:
            buffer.written = moved.ready
        return moved

    def take(self, moved: Moved, batch: Any) -> Any:
        """Return the device's batch for the step, whose stream waits for it.

        Args:
            moved: the batch when it was moved.
            batch: the same now; tensors that were changed or are new stay on the host.
        """
        if moved.ready is not None:
            self.streams.step_waits(moved.ready)
        found, whole = moved.on_device(batch)
        for buffer in moved.buffers:
            if buffer.is_new:
                self.streams.used_by_step(buffer.tensor)
                buffer.is_new = False
        if not (moved.is_prepared and whole):
            return found
        ours = {buffer.tensor.untyped_storage().data_ptr() for buffer in moved.buffers}
        for tensor in tensors_in(moved.prepared):
            is_new = tensor.device.type == self.streams.device.type and tensor.untyped_storage().data_ptr() not in ours
            if is_new:
                self.streams.used_by_step(tensor)
        return moved.prepared

    def release(self, moved: Moved) -> Mark:
        """Note that the step has been given all its work on a batch; return the end of that work."""
        used = self.streams.mark_step()
        self.pool.give_back(moved.buffers, used)
        return used

    def _copy(self, tensor: Tensor) -> Buffer:
        source = tensor.detach()
        kind = self._kind(source)
        buffer = self.pool.take(kind)
        if buffer.written is not None:
            buffer.written.synchronize()  # then staging and source are free
        if not self.streams.is_pinned(source) or source.stride() != kind.source_stride:
            if buffer.staging is None:
                buffer.staging = self.streams.pinned(kind.shape, kind.source_stride, kind.source_dtype)
            source = buffer.staging.copy_(source)
        buffer.source = source
        if buffer.used is not None:
            self.streams.side_waits(buffer.used)
        if kind.is_copied_straight:
            self.streams.copy(buffer.tensor, source)
        else:
            landing = self.pool.landing(kind)
            self.streams.copy(landing, source)
            self.streams.copy(buffer.tensor, landing)
        return buffer

    def _kind(self, tensor: Tensor) -> Kind:
        key = (tensor.shape, tensor.stride(), tensor.dtype)
        kind = self._kinds.get(key)
        if kind is None:
            # The device gets what `.to(device)` would give: dense tensors keep their strides, others become contiguous.
            source = torch.empty_like(tensor, device="meta")
            target = source.to(self.dtype) if self.dtype is not None and source.is_floating_point() else source
            for transform in self.layouts():
                target = transform(target)
            if self.channels_last and _is_image(target):
                target = target.contiguous(memory_format=FORMATS[target.dim()])
            if len(self._kinds) > 1024:  # ragged data: a new shape with every batch
                self._kinds.clear()
            kind = Kind(source.shape, source.stride(), source.dtype, target.stride(), target.dtype)
            self._kinds[key] = kind
        return kind


def _can_move(tensor: Tensor) -> bool:
    is_plain = type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.layout == torch.strided
    return is_plain and not (tensor.requires_grad or tensor.is_quantized or tensor.is_inference())


def _is_image(tensor: Tensor) -> bool:
    kept = tensor.is_floating_point() or tensor.dtype == torch.uint8
    return tensor.dim() in FORMATS and tensor.shape[1] > 1 and kept
