"""Samples a second on each of two GPUs, against one: every variant in processes of its own, one after another.

    python -m fasttrain.callbacks.cuda_graph_step.bench_ranks MODULE:FUNCTION VARIANT ANSWER    # one rank of it

A fit without a loader, since what is asked is what averaging costs: batches lie on the device.
"""

import json
import math
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from fasttrain.batches import map_tensors
from fasttrain.callbacks.cuda_graph_step.bench_fit import StepTimer, timed_fit
from fasttrain.callbacks.cuda_graph_step.callback import CUDAGraphStep
from fasttrain.config import DDPConfig
from fasttrain.ddp import make_ddp
from fasttrain.measure import Row, make_row

CASE, METRIC = "two_gpus", "samples_per_second_per_gpu"

VARIANTS = {"one_gpu": (1, True), "two_gpus_eager": (2, False), "two_gpus_graph": (2, True)}
"""Variant -> processes, and whether the step is captured."""

SECONDS, LAST_WORDS = 240.0, 1500
"""After which a rank counts as hung, and characters of what it printed last that the error shows."""


@dataclass(frozen=True)
class RankWork:
    """What each rank trains on."""

    module: pl.LightningModule
    batches: Sequence[Any]
    """On the CPU."""
    samples: int
    """In a batch."""
    what: str
    """For the row's note."""
    warm_up: int = 30
    windows: int = 6
    window: int = 10
    """Steps between two looks at the clock. Every rank takes as many steps, whatever its own clock says."""


def two_gpus(subject: str, target: str) -> Iterator[Row]:
    """Yield samples a second and GPU of each variant, the slower rank's; none, and say so, on fewer than two GPUs.

    Args:
        subject: of the rows.
        target: `module:function`, which returns the `RankWork` in each process.
    """
    if torch.cuda.device_count() < 2:
        print(f"{subject}: {CASE} needs two GPUs, and there is {torch.cuda.device_count()}")
        return
    for variant, (ranks, _) in VARIANTS.items():
        told = on_ranks(target, variant, ranks)
        if why := next((each["why"] for each in told if each["why"]), None):
            print(f"{subject}: {CASE} has no row for {variant}: {why}")
            continue
        rates = [min(each) for each in zip(*(each["rates"] for each in told), strict=True)]
        yield make_row(subject, CASE, variant, METRIC, "1/s", rates, told[0]["note"])


def on_ranks(target: str, variant: str, ranks: int) -> list[dict[str, Any]]:
    """Return what each rank of a variant found.

    Raises:
        RuntimeError: one failed, with its last words, or took longer than `SECONDS`.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        port = _free_port()
        for rank in range(ranks):
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
            command = [sys.executable, "-m", __name__, target, variant, f"{folder}/{rank}.json"]
            with open(f"{folder}/{rank}.txt", "wb") as printed:
                environment = {**os.environ, **(place if ranks > 1 else {})}
                processes.append(subprocess.Popen(command, env=environment, stdout=printed, stderr=printed))
        try:
            codes = [process.wait(SECONDS) for process in processes]
        except subprocess.TimeoutExpired:
            codes = [-1]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(codes):
            words = [Path(f"{folder}/{rank}.txt").read_text(errors="replace")[-LAST_WORDS:] for rank in range(ranks)]
            raise RuntimeError(f"{target}, {variant}: exit codes {codes}; last words:\n" + "\n----\n".join(words))
        return [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(ranks)]


def measure(target: str, variant: str) -> dict[str, Any]:
    """Run this rank's part of a variant; return its rates by window, and why they don't count if they don't."""
    ranks, captures = VARIANTS[variant]
    module, _, function = target.partition(":")
    work: RankWork = getattr(import_module(module), function)()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    batches = [map_tensors(batch, lambda tensor: tensor.to(device)) for batch in work.batches]
    timer = StepTimer(
        work.warm_up, work.window, math.inf, CUDAGraphStep(stand_in=not on_gpu) if captures else None
    )  # fmt: skip
    options: dict[str, Any] = {"devices": ranks, "strategy": make_ddp(DDPConfig())} if ranks > 1 else {}
    steps = work.warm_up + work.window * work.windows + 1
    precision, accelerator = ("bf16-mixed", "gpu") if on_gpu else ("32-true", "cpu")
    timed_fit(work.module, batches, timer, steps, precision, accelerator, **options)
    how = "whole step in a CUDA graph" if captures else "eager"
    averaged = ", DDP over NCCL" if ranks > 1 else ""
    return {
        "rates": [work.samples / ms * 1e3 for ms in timer.step_ms],
        "why": timer.why_not_credited,
        "note": f"{work.what}; {how}{averaged}; Trainer.fit, {precision}, batches on the device, no loader",
    }


def _free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(measure(sys.argv[1], sys.argv[2])))
