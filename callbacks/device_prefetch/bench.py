"""A loop over pinned batches with a step of known length: plain copies, this room's, and the step alone."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from fasttrain.bench import Case
from fasttrain.callbacks.device_prefetch.any_loop import DeviceBatches
from fasttrain.callbacks.device_prefetch.reference import moved_plainly
from fasttrain.callbacks.device_prefetch.streams import ImmediateStreams
from fasttrain.measure import Row, make_row

STEP_MS = 20.0
BATCHES, REPEATS = 30, 7
SHAPE = (32, 3, 800, 800)


def cases() -> list[Case]:
    """Return the room's bench cases."""
    made = [
        Case("device_prefetch", f"detection_800_{name}", f"32 images of 800² in {name}, a step of {STEP_MS:.0f} ms",
             lambda dtype=dtype: loop_rows(dtype), needs_gpu=True)  # type: ignore[misc]
        for name, dtype in (("uint8", torch.uint8), ("fp32", torch.float32))
    ]  # fmt: skip
    return [*made, Case("device_prefetch", "bookkeeping_cpu", "host time of a small batch on the CPU", host_rows)]


def loop_rows(dtype: torch.dtype) -> Iterator[Row]:
    """Yield milliseconds a step of a loop of `BATCHES` steps, in channels_last."""
    device = torch.device("cuda")
    host = [_batch(dtype).pin_memory() for _ in range(4)]
    step = step_of(STEP_MS)
    resident = moved_plainly(host[0], device, channels_last=True)
    loader = _Repeated(host, BATCHES)

    def plainly() -> Iterable[Any]:
        return (_moved(batch, device) for batch in loader)

    variants: dict[str, Callable[[], Iterable[Any]]] = {
        "plain": plainly,
        "ours": lambda: DeviceBatches(loader, device, channels_last=True),
        "floor": lambda: [resident] * BATCHES,
    }
    case = f"detection_800_{'uint8' if dtype == torch.uint8 else 'fp32'}"
    for variant, batches in variants.items():
        times = [_loop_ms(batches(), step) for _ in range(REPEATS + 1)][1:]
        yield make_row("device_prefetch", case, variant, "step_ms", "ms", times, f"step of {STEP_MS:.0f} ms")


def host_rows() -> Iterator[Row]:
    """Yield microseconds of host time a batch of two small tensors, moved and taken."""
    host = [[torch.rand(8, 8), torch.arange(8)] for _ in range(200)]
    device = torch.device("cpu")
    for variant in ("plain", "ours"):
        times = []
        for _ in range(REPEATS):
            batches = (
                (moved_plainly(batch, device) for batch in host)
                if variant == "plain"
                else DeviceBatches(host, device, streams=ImmediateStreams(device))
            )
            begin = time.perf_counter()
            for _ in batches:
                pass
            times.append((time.perf_counter() - begin) / len(host) * 1e6)
        yield make_row("device_prefetch", "bookkeeping_cpu", variant, "host_us", "us", times, "no copy to hide")


def step_of(milliseconds: float) -> Callable[[Tensor], None]:
    """Return a step that keeps the GPU busy for so long, and reads its batch."""
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(matrix)

    def product() -> None:
        torch.mm(matrix, matrix, out=out)

    for _ in range(10):
        product()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(50):
        product()
    stop.record()
    stop.synchronize()
    count = max(1, round(milliseconds / (start.elapsed_time(stop) / 50)))

    def step(batch: Tensor) -> None:
        batch.view(-1)[:1].float() if batch.is_contiguous() else batch[0, 0, 0, :1].float()
        for _ in range(count):
            product()

    return step


def _loop_ms(batches: Iterable[Any], step: Callable[[Tensor], None]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for batch in batches:
        step(batch)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / BATCHES * 1e3


def _moved(batch: Tensor, device: torch.device) -> Tensor:
    return batch.to(device, non_blocking=True).contiguous(memory_format=torch.channels_last)


def _batch(dtype: torch.dtype) -> Tensor:
    return torch.randint(256, SHAPE, dtype=torch.uint8) if dtype == torch.uint8 else torch.rand(SHAPE)


class _Repeated:
    """Some batches again and again: a loader that costs nothing."""

    def __init__(self, batches: list[Tensor], count: int) -> None:
        self.batches, self.count = batches, count

    def __iter__(self) -> Iterator[Tensor]:
        return (self.batches[number % len(self.batches)] for number in range(self.count))
