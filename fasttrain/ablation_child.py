"""One variant of an ablation, in a process of its own: `python -m fasttrain.ablation_child CONFIG TOLD WORK`.

CONFIG is a resolved configuration and WORK a file that holds a `Work` in JSON. To TOLD goes what came of it: first the
plan, then the measurements. If the variant ends its process, what was written until then is there.
"""

import importlib
import json
import statistics
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from fasttrain.bench_data import SETTLING, Rates
from fasttrain.errors import DataError, FasttrainError
from fasttrain.measure import AUTOCAST, synchronize
from fasttrain.measured_fit import fit_to_measure, made_ahead, new_recorder
from fasttrain.quiet import quiet_libraries
from fasttrain.recipe import resolve
from fasttrain.recorder import RunRecorder
from fasttrain.run import Prepared, prepare
from fasttrain.step_clock import StepClock
from fasttrain.trainer import stop_now, train_without_end

WARM_UP = 20
"""Steps at least before the first that counts: captures, compilations, the choice of convolution algorithms. Where the
loader makes more batches ahead, as many as those: they have cost nothing that the step would wait for."""

LOSSES = 20
"""First steps whose losses are kept."""


@dataclass(frozen=True)
class Work:
    """What to measure."""

    catalogue: str
    """`module:name` of the optimizations that may be asked for."""
    steps: int
    """Steps that count; with 0 only the first losses are wanted."""
    began: float
    """`time.time()` when the process was started."""
    needed: str = ""
    """An optimization without which there is nothing to measure."""
    rounded: bool = False
    """Whether each weight is first moved by the rounding of the precision that the run computes in."""


@dataclass
class Told:
    """What came of a variant."""

    plan: dict[str, Any] = field(default_factory=dict)
    """`Plan.record`."""
    losses: list[float] = field(default_factory=list)
    """Of the first steps."""
    samples_per_second: list[float] = field(default_factory=list)
    """Of consecutive parts of the steady state."""
    memory_gb: float | None = None
    """Most memory reserved on the GPU, or of the process on a CPU, in GB (10⁹)."""
    start_up_s: float | None = None
    """Seconds from the process's start to the end of warm-up, less those of as many steady steps."""
    error: str = ""
    """Why it is not whole."""

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @property
    def refused(self) -> dict[str, str]:
        """Name -> reason of the optimizations that don't apply."""
        return {row["name"]: row["reason"] for row in self._rows if row["verdict"] == "refused"}

    @property
    def grades(self) -> dict[str, str]:
        """Name -> grade of those that apply."""
        return {row["name"]: row["grade"] for row in self._rows if row["verdict"] == "applies"}

    @property
    def _rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.plan.get("optimizations", [])
        return rows


def measure(config: Path, work: Work, told: Told, path: Path) -> None:
    """Fit the configuration as long as the work asks for, and complete `told`, which is written when the plan is known.

    Raises:
        DataError: training ended before there was anything to measure.
        FasttrainError: from the recipe or an optimization.
    """
    catalogue = _named(work.catalogue)
    with quiet_libraries():
        prepared = prepare(resolve(config), catalogue)
        told.plan = prepared.plan.record()
        told.write(path)
        if work.needed and work.needed not in told.grades:
            return
        if work.rounded:
            move_by_rounding(prepared.recipe.module, roundoff(prepared))
        clock = StepClock(prepared.context.hardware.device)
        recorder = new_recorder(prepared, clock)
        watch = Watch(clock, recorder, work.steps)
        fit_to_measure(prepared, recorder, clock, [watch])
    told.losses = [float(loss) for loss in watch.losses]
    if work.steps == 0:
        return
    first = watch.warm_up + SETTLING
    times = clock.steps(first, first + work.steps)
    if len(times) < work.steps or watch.warm_at is None:
        name = type(prepared.recipe.data).__name__
        raise DataError(f"training ended after {clock.begun} steps; does {name} give batches again in a next epoch?")
    seconds = [step.whole for step in times]
    rates = Rates.of(watch.samples[first : first + work.steps], seconds)
    told.samples_per_second = list(rates.parts)
    told.memory_gb = _memory_gb(prepared.context.hardware.device)
    told.start_up_s = max(0.0, watch.warm_at - work.began - watch.warm_up * statistics.median(seconds))


class Watch(pl.Callback):
    """Keeps the first losses, counts samples, notes when warm-up is over, and ends the fit when enough was seen.

    Args:
        clock: counts the steps.
        recorder: counts the samples; stands before this in the list of callbacks.
        steps: to be measured after the warm-up; with 0 the first losses are enough.
    """

    def __init__(self, clock: StepClock, recorder: RunRecorder, steps: int) -> None:
        self.clock, self.recorder, self.steps = clock, recorder, steps
        self.warm_up = WARM_UP
        self.warm_at: float | None = None
        """`time.time()` at the end of warm-up, its work done."""
        self.losses: list[Tensor] = []
        self.samples: list[int] = []
        """By step."""
        self._before = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the fit go on until this ends it."""
        train_without_end(trainer)
        self.warm_up = max(WARM_UP, made_ahead(CombinedLoader(trainer.train_dataloader)))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at one step's results."""
        self.samples.append(self.recorder.samples - self._before)
        self._before = self.recorder.samples
        if len(self.losses) < LOSSES and (loss := _loss(outputs)) is not None:
            self.losses.append(loss.detach().float().clone())
        if len(self.samples) == self.warm_up:
            synchronize(pl_module.device)
            self.warm_at = time.time()
        last = self.warm_up + SETTLING + self.steps + 1 if self.steps else LOSSES
        if len(self.samples) >= last:
            stop_now(trainer)


def roundoff(prepared: Prepared) -> float:
    """Return the largest relative error of rounding a number to what the run multiplies: half its last place's."""
    precision = prepared.context.precision
    dtype = AUTOCAST.get(precision, torch.bfloat16 if "bf16" in precision else torch.float32)
    on_gpu = torch.device(prepared.context.hardware.device).type == "cuda"
    if dtype is torch.float32 and on_gpu and torch.backends.cudnn.allow_tf32:
        dtype = torch.float16  # TF32 has as many bits after the point
    return torch.finfo(dtype).eps / 2


def move_by_rounding(module: pl.LightningModule, relative: float) -> None:
    """Multiply each parameter by 1 + or - `relative`, by turns of a generator of its own. In place."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=generator).mul_(2).sub_(1)
            parameter.mul_(1 + relative * signs.to(parameter))


def _loss(outputs: Any) -> Tensor | None:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _memory_gb(device: str) -> float:
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 1e9
    import resource  # Windows has none

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most * (1 if sys.platform == "darwin" else 1024) / 1e9


def _named(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def main(arguments: list[str]) -> None:
    """Measure, and write what came of it."""
    config, path, work = map(Path, arguments)
    told = Told()
    try:
        measure(config, Work(**json.loads(work.read_text(encoding="utf-8"))), told, path)
    except FasttrainError as error:
        told.error = str(error)
    except Exception as error:  # whatever it is, the other variants are still to come
        traceback.print_exc()
        told.error = f"{type(error).__name__}: {' '.join(str(error).split())}"
    told.write(path)


if __name__ == "__main__":
    main(sys.argv[1:])
