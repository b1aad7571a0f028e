"""Seconds of a network's first step in a process of its own: `python -m fasttrain.callbacks.compile.start_up CASE WHO`.

`WHO` is eager, compile (the whole network) or ours (regions). It prints one line of JSON: `first` and `later` seconds.
Where compiled code is looked for is said by TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fasttrain.callbacks.compile.compiled import CompiledRegions
from fasttrain.callbacks.compile.work import WORKS
from fasttrain.measure import synchronize

LATER_STEPS = 5


def start_up_seconds(case: str, who: str, cache: Path) -> float:
    """Return what a first step takes longer than a later one, in a new process that keeps what it compiles in `cache`.

    Raises:
        RuntimeError: the process failed; its last words are in the message.
    """
    places = {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}
    done = subprocess.run(
        [sys.executable, "-m", "fasttrain.callbacks.compile.start_up", case, who],
        env={**os.environ, **places}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"start_up {case} {who} failed: {done.stderr[-2000:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    return float(told["first"]) - float(told["later"])


def steps(case: str, who: str) -> dict[str, float]:
    """Take a first step and some later ones; return the seconds of the first and the least of the later."""
    work = WORKS[case]
    model, batch = work.made()
    forward: Any = torch.compile(model) if who == "compile" else model
    if who == "ours":
        CompiledRegions(model).apply()
    step = work.step(model, forward, batch)
    seconds = []
    for _ in range(1 + LATER_STEPS):
        synchronize(work.device)
        begin = time.perf_counter()
        step()
        synchronize(work.device)
        seconds.append(time.perf_counter() - begin)
    return {"first": seconds[0], "later": min(seconds[1:])}


if __name__ == "__main__":
    print(json.dumps(steps(*sys.argv[1:])))
