"""Steps of whole networks eager, compiled whole and by regions; and what the first step of each takes longer."""

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fasttrain.bench import Case
from fasttrain.callbacks.compile.compiled import CompiledRegions
from fasttrain.callbacks.compile.start_up import start_up_seconds
from fasttrain.callbacks.compile.work import WORKS
from fasttrain.floor import H200_FLOP_PER_SECOND
from fasttrain.measure import Row, captured, make_row, sample_ms

VARIANTS = ("eager", "compile", "ours")


def cases() -> list[Case]:
    """Return the room's bench cases."""
    return [
        Case("compile", name, f"{work.summary}: steps and start-up", partial(rows, name), work.device == "cuda")
        for name, work in WORKS.items()
    ]


def rows(name: str) -> Iterator[Row]:
    """Yield milliseconds of a step by variant, and seconds of start-up with an empty cache and with a filled one.

    `compile` is torch.compile of the whole network, `ours` of its regions.
    """
    yield from _steps(name)
    yield from _starts(name)


def _steps(name: str) -> Iterator[Row]:
    work = WORKS[name]
    on_gpu = work.device == "cuda"
    note = "forward and backward, in a CUDA graph" if on_gpu else "forward and backward"
    for variant in VARIANTS:
        torch._dynamo.reset()
        model, batch = work.made()
        forward: Any = torch.compile(model) if variant == "compile" else model
        if variant == "ours":
            CompiledRegions(model).apply()
        step = work.step(model, forward, batch)
        times = sample_ms(captured(step) if on_gpu else step, work.device, warmup=5, repeats=30)
        yield make_row("compile", name, variant, "fwd_bwd_ms", "ms", times, note)
    if on_gpu:
        floor_ms = work.flop() / H200_FLOP_PER_SECOND * 1e3
        yield make_row("compile", name, "floor", "fwd_bwd_ms", "ms", [floor_ms], "operations over 790 TFLOP/s")


def _starts(name: str) -> Iterator[Row]:
    note = "first step less a later one, in a new process"
    with tempfile.TemporaryDirectory(prefix="fasttrain-bench-") as folder:
        seconds = start_up_seconds(name, "eager", Path(folder))
        yield make_row("compile", name, "eager", "start_up_s", "s", [seconds], note)
        for variant in ("compile", "ours"):
            for start in ("cold", "warm"):
                seconds = start_up_seconds(name, variant, Path(folder, variant))
                what = "nothing" if start == "cold" else "everything"
                told = f"{note}; {what} compiled before"
                yield make_row("compile", name, f"{variant}_{start}", "start_up_s", "s", [seconds], told)
