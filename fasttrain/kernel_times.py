"""Where a GPU's time goes during a few steps of a fit: by kind of kernel, and the gaps in which nothing runs."""

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.profiler import ProfilerActivity, profile

from fasttrain.measure import synchronize

Kinds = Mapping[str, Sequence[str]]
"""Kind -> parts of its kernels' names in lower case. The first kind that has one of a name's parts gets the kernel."""

GAP, OTHER = "gap", "other"

ON_THE_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace's events that are work of the GPU."""

LEAST_OF_A_REPLAY = 50
"""Kernels with one correlation number: so many have none but a graph, whose launch is one call."""


@dataclass(frozen=True)
class Kernel:
    """One kernel, copy or fill, in microseconds of the trace's clock."""

    name: str
    begin: float
    end: float
    launch: int = 0
    """Number of the call that launched it; all kernels of a graph have their replay's."""


def kernels_in(trace: Path) -> list[Kernel]:
    """Return the GPU's work in a trace as `torch.profiler` exports it, by begin."""
    events = json.loads(trace.read_text())["traceEvents"]
    found = [
        Kernel(e["name"], e["ts"], e["ts"] + e["dur"], e.get("args", {}).get("correlation", 0))
        for e in events
        if e.get("cat") in ON_THE_DEVICE
    ]
    return sorted(found, key=lambda kernel: kernel.begin)


def replays_in(kernels: Iterable[Kernel]) -> list[float]:
    """Return the begin of each graph's replay."""
    by_launch = groupby(sorted(kernels, key=lambda k: (k.launch, k.begin)), key=lambda k: k.launch)
    groups = [list(group) for launch, group in by_launch if launch]
    return sorted(group[0].begin for group in groups if len(group) >= LEAST_OF_A_REPLAY)


def kind_of(name: str, kinds: Kinds) -> str:
    """Return the kind of a kernel, OTHER if its name says nothing."""
    name = name.lower()
    return next((kind for kind, parts in kinds.items() if any(part in name for part in parts)), OTHER)


def time_by_kind(
    kernels: Iterable[Kernel], kinds: Kinds, begin: float, end: float, beside: Sequence[str] = ()
) -> dict[str, float]:
    """Divide the time from `begin` to `end` among the kinds of kernels; the values add up to all of it.

    Moments in which kernels of several kinds run are divided evenly among these kernels, and in GAP nothing runs.

    Args:
        kernels: some may lie outside.
        kinds: by name.
        begin, end: in the kernels' unit, which is the result's too.
        beside: kinds that get only the time in which no other runs, being work that others are done over.
    """
    times = dict.fromkeys((*kinds, OTHER, GAP), 0.0)
    edges: list[tuple[float, int, str]] = []
    for kernel in kernels:
        first, last = max(kernel.begin, begin), min(kernel.end, end)
        if first < last:
            kind = kind_of(kernel.name, kinds)
            edges += [(first, 1, kind), (last, -1, kind)]
    edges = [(begin, 0, GAP), *sorted(edges), (end, 0, GAP)]
    running = dict.fromkeys(times, 0)
    for (now, change, kind), (then, _, _) in pairwise(edges):
        running[kind] += change
        active = {k: n for k, n in running.items() if n and k not in beside}
        active = active or {k: n for k, n in running.items() if n} or {GAP: 1}
        for k, n in active.items():
            times[k] += (then - now) * n / sum(active.values())
    return times


def longest(kernels: Iterable[Kernel], kinds: Kinds, begin: float, end: float) -> list[tuple[str, str, float, int]]:
    """Return (kind, name, time in all, count) of the kernels within, the longest in all first."""
    total: dict[str, tuple[float, int]] = {}
    for kernel in kernels:
        if begin <= kernel.begin < end:
            time, count = total.get(kernel.name, (0.0, 0))
            total[kernel.name] = (time + kernel.end - kernel.begin, count + 1)
    ordered = sorted(total.items(), key=lambda item: -item[1][0])
    return [(kind_of(name, kinds), name, time, count) for name, (time, count) in ordered]


class StepProfile(pl.Callback):
    """Traces the GPU during some steps of a fit.

    Args:
        first: batch of the first epoch after which it begins.
        steps: that are traced.
    """

    def __init__(self, first: int, steps: int) -> None:
        self.first, self.steps = first, steps
        self.kernels: list[Kernel] = []
        """Of the traced steps, once they are over."""
        self._profile: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the tracing library once: graphs that are made before it is there may stay unseen."""
        with self._tracing(pl_module.device):
            torch.ones(1, device=pl_module.device).add_(1)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Begin or end."""
        if batch_idx == self.first:
            self._profile = self._tracing(pl_module.device)
            self._profile.__enter__()
        elif batch_idx == self.first + self.steps and self._profile is not None:
            synchronize(pl_module.device)
            self._profile.__exit__(None, None, None)
            with tempfile.TemporaryDirectory() as folder:
                trace = Path(folder) / "trace.json"
                self._profile.export_chrome_trace(str(trace))
                self.kernels = kernels_in(trace)
            self._profile = None

    def _tracing(self, device: torch.device) -> Any:
        return profile(activities=[ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU])


def window_of(
    kernels: Sequence[Kernel], keep: Callable[[float], bool] = lambda begin: True
) -> tuple[float, float, int]:
    """Return begin, end and number of the whole steps in a trace: from the first replay that is kept to the last one.

    Where no graph is replayed it is one window from the first kernel to the end of the last, counted as 0 steps.
    """
    begins = [begin for begin in replays_in(kernels) if keep(begin)]
    if len(begins) < 2:
        return (kernels[0].begin, max(k.end for k in kernels), 0) if kernels else (0.0, 0.0, 0)
    return begins[0], begins[-1], len(begins) - 1
