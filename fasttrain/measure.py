"""Timing that can be believed, and the row in which every measurement is kept."""

import copy
import csv
import inspect
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from fasttrain.capture import captured as captured  # what is timed often is a replay
from fasttrain.environment import Hardware, cpu_name, source_commit
from fasttrain.errors import DataError, FasttrainError, OptimizationError
from fasttrain.randomness import random_state_kept


@dataclass(frozen=True)
class Row:
    """One measurement, in the schema of `benchmarks/results/*.csv`."""

    subject: str
    """A room or a recipe."""
    case: str
    """The work that was done."""
    variant: str
    """Who did it: plain, eager, compile, ours, full, floor, or a peer's name."""
    metric: str
    """What was measured, with its unit in the name where it has one."""
    value: float
    """The median."""
    unit: str
    p10: float
    p90: float
    repeats: int
    gpu: str = ""
    cpu: str = ""
    torch: str = ""
    cudnn: str = ""
    date: str = ""
    commit: str = ""
    note: str = ""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: the median of `repeats`, with the 10th and 90th percentile."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    repeats: int


def summarize(values: Iterable[float]) -> tuple[float, float, float, int]:
    """Return median, 10th and 90th percentile (linear between neighbours) and count of at least one value."""
    ordered = sorted(values)
    return statistics.median(ordered), _quantile(ordered, 0.1), _quantile(ordered, 0.9), len(ordered)


def make_row(
    subject: str, case: str, variant: str, metric: str, unit: str, values: Iterable[float], note: str = ""
) -> Row:
    """Return the row of a set of repeats measured on this machine, now, by this checkout."""
    value, p10, p90, repeats = summarize(values)
    on_gpu = torch.cuda.is_available()
    return Row(
        subject, case, variant, metric, round(value, 6), unit, round(p10, 6), round(p90, 6), repeats,
        gpu=torch.cuda.get_device_name(0) if on_gpu else "",
        cpu=f"{cpu_name()}, {Hardware.here().cores} cores, Python {platform.python_version()}",
        torch=torch.__version__,
        cudnn=str(torch.backends.cudnn.version()) if on_gpu else "",
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        commit=source_commit(),
        note=note,
    )  # fmt: skip


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Append rows to a CSV file, with its header if the file is new.

    Raises:
        DataError: it can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists() or path.stat().st_size == 0
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, _columns())
            if new:
                writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
    except OSError as error:
        raise DataError(f"the rows can't be written to {path} ({error.strerror}); name another file.") from error


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a CSV file.

    Raises:
        DataError: a column is missing, a row is cut off, or a number isn't one.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [f.name for f in fields(Row) if f.name not in (reader.fieldnames or ())]
        if missing:
            raise DataError(f"{path} has no column '{missing[0]}'; result rows have {', '.join(_columns())}.")
        rows = []
        for raw in reader:
            if None in raw.values():
                raise DataError(f"{path}, line {reader.line_num}: the row is shorter than the header.")
            try:
                numbers = {key: float(raw[key]) for key in ("value", "p10", "p90")}
                repeats = int(raw["repeats"])
            except ValueError as error:
                raise DataError(f"{path}, line {reader.line_num}: {error}.") from None
            rows.append(Row(**{**{key: raw[key] for key in _columns()}, **numbers, "repeats": repeats}))  # type: ignore[arg-type]
        return rows


def synchronize(device: torch.device | str) -> None:
    """Wait for the device's work, so that a host clock read afterwards means something."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def ms_text(milliseconds: float) -> str:
    """Return milliseconds with three digits that mean something."""
    return f"{milliseconds:,.0f}" if milliseconds >= 1000 else f"{milliseconds:.3g}"


def sample_ms(
    call: Callable[[], Any], device: torch.device | str, *, warmup: int = 3, repeats: int = 10
) -> list[float]:
    """Return the milliseconds of each repeat. On CUDA by events around each call, on a CPU by the host clock."""
    for _ in range(warmup):
        call()
    synchronize(device)
    times = []
    for _ in range(repeats):
        if torch.device(device).type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        else:
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1e3)
    return times


def time_ms(call: Callable[[], Any], device: torch.device | str, *, warmup: int = 3, repeats: int = 10) -> Timing:
    """Return median and spread of `sample_ms`."""
    return Timing(*summarize(sample_ms(call, device, warmup=warmup, repeats=repeats)))


# Lightning's mixed precisions and the type that autocast uses for them.
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class StepProbe:
    """Runs a module's training step outside of a Trainer, on copies, to compare ways of doing it.

    Each variant works on deep copies, on the device that the run will use; the module, the batch and the global random
    state are left as they were. `self.log` in the step does nothing. Modules stay in training or evaluation mode, as
    they do in a fit.

    Args:
        in_graph: Time replays of the step as a CUDA graph, where it can be captured: without the launches, which a run
            that replays its step does not pay either.
    """

    def __init__(self, module: pl.LightningModule, batch: Any, device: str, in_graph: bool = False) -> None:
        self.module, self.batch, self.device = module, batch, torch.device(device)
        self.in_graph = in_graph and self.device.type == "cuda"

    def __call__(self, *arguments: Any, **options: Any) -> Timing:
        """Return median and spread of `sample_ms`, which takes the same arguments."""
        return Timing(*summarize(self.sample_ms(*arguments, **options)))

    def sample_ms(
        self,
        prepare: Callable[[pl.LightningModule, Any], Any] | None = None,
        autocast: torch.dtype | None = None,
        warmup: int = 2,
        repeats: int = 7,
    ) -> list[float]:
        """Time forward and backward after `prepare(module_copy, device_batch)`, which returns the batch to use.

        Raises:
            OptimizationError: the step does not run outside of a Trainer.
        """
        try:
            return self._sample_ms(prepare, autocast, warmup, repeats)
        except FasttrainError:
            raise
        except Exception as error:  # a user's step may ask its Trainer for something, and a probe has none
            raise OptimizationError(
                f"the step could not be measured outside of a Trainer ({type(error).__name__}: {error})"
            ) from error

    def compare(
        self, prepare: Callable[[pl.LightningModule, Any], Any], autocast: torch.dtype | None = None
    ) -> tuple[Timing, Timing]:
        """Return the timing of the plain step and of the prepared one.

        Taken in the order plain, prepared, prepared, plain, so that a machine that slows down or speeds up meanwhile
        favours neither.
        """
        plain: list[float] = []
        prepared: list[float] = []
        in_graph = self.in_graph
        for times, variant in ((plain, None), (prepared, prepare), (prepared, prepare), (plain, None)):
            times += self.sample_ms(variant, autocast, repeats=4)
        if in_graph != self.in_graph:
            return self.compare(prepare, autocast)  # one of them could not be captured, so neither is
        return Timing(*summarize(plain)), Timing(*summarize(prepared))

    def _sample_ms(
        self,
        prepare: Callable[[pl.LightningModule, Any], Any] | None,
        autocast: torch.dtype | None,
        warmup: int,
        repeats: int,
    ) -> list[float]:
        if self.device.type == "cuda":
            torch.cuda.init()  # before that its random state can't be kept
        with random_state_kept(), warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")  # Lightning warns that `self.log` has no Trainer, which is the point here
            module = copy.deepcopy(self.module).to(self.device)
            batch = pl.utilities.move_data_to_device(copy.deepcopy(self.batch), self.device)
            if prepare is not None:
                batch = prepare(module, batch)
            takes_index = "batch_idx" in inspect.signature(module.training_step).parameters

            def step() -> None:
                with torch.autocast(self.device.type, autocast or torch.bfloat16, enabled=autocast is not None):
                    output = module.training_step(batch, 0) if takes_index else module.training_step(batch)
                loss: Any = output["loss"] if isinstance(output, dict) else output
                loss.backward()
                module.zero_grad()

            call = self._replayed(step) if self.in_graph else step
            return sample_ms(call, self.device, warmup=warmup, repeats=repeats)

    def _replayed(self, step: Callable[[], None]) -> Callable[[], None]:
        try:
            return captured(step)
        except RuntimeError:
            self.in_graph = False
            return step


def _columns() -> list[str]:
    return [f.name for f in fields(Row)]


def _quantile(ordered: list[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
