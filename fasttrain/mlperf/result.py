"""A result file read back. Neither torch nor Lightning is imported: a report opens at once."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasttrain.errors import DataError

TOKEN = ":::MLLOG "
SAME_BENCHMARK = {"retinanet": "ssd"}
"""Later names of MLPerf's benchmarks -> those of v2.0."""


@dataclass(frozen=True)
class RunResult:
    """One attempt as its file tells it; None where the file doesn't say."""

    path: Path
    ruleset: str
    """By which it was written, where it says so; else v2.0's."""
    benchmark: str | None
    division: str | None
    platform: str | None
    global_batch: int | None
    status: str | None
    """`success` or `aborted`; None where the run never stopped in order."""
    seconds: float | None
    """From `run_start` to `run_stop`."""
    init_seconds: float | None
    scores: tuple[tuple[float, Any], ...]
    """(epoch_num, score) of each evaluation; a score is a number, or several by name."""
    samples_per_second: float | None
    """Training throughput as logged, median of what was tracked after the first value; of one process or of all."""

    @property
    def converged(self) -> bool:
        """Whether the run says that it reached its target."""
        return self.status == "success" and self.seconds is not None

    @property
    def to_converge(self) -> float | None:
        """Epochs, or samples, trained when the last score was made."""
        return self.scores[-1][0] if self.converged and self.scores else None


def result_files(folder: Path) -> list[Path]:
    """Return a folder's result_N.txt by number."""
    found = [path for path in folder.glob("result_*.txt") if path.stem.rpartition("_")[2].isdigit()]
    return sorted(found, key=lambda path: int(path.stem.rpartition("_")[2]))


def read_result(path: Path) -> RunResult:
    """Read a result file, of fasttrain or of anybody else.

    Raises:
        DataError: it can't be read, or an event's line is cut short.
    """
    try:
        text = path.read_text(encoding="latin-1")
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}.") from None
    events = list(_events(path, text.splitlines()))
    times = {key: [event["time_ms"] for event in events if event["key"] == key] for key in CLOCK}
    stop = next((event for event in reversed(events) if event["key"] == "run_stop"), None)
    started = times["run_start"][0] if times["run_start"] else None
    benchmark = _value(events, "submission_benchmark")
    return RunResult(
        path=path,
        ruleset=_value(events, "mlperf_ruleset") or "2.0.0",
        benchmark=SAME_BENCHMARK.get(benchmark, benchmark),
        division=_value(events, "submission_division"),
        platform=_value(events, "submission_platform"),
        global_batch=_value(events, "global_batch_size"),
        status=stop["metadata"].get("status") if stop else None,
        seconds=(stop["time_ms"] - started) / 1000 if stop and started is not None else None,
        init_seconds=(started - min(times["init_start"])) / 1000 if started and times["init_start"] else None,
        scores=tuple(
            (event["metadata"].get("epoch_num", 0), event["value"])
            for event in events
            if event["key"] == "eval_accuracy"
        ),
        samples_per_second=_throughput(events),
    )


CLOCK = ("init_start", "run_start")


def _events(path: Path, lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        _, token, text = line.partition(TOKEN)
        if not token:
            continue
        try:
            event = json.loads(text)
            yield {
                **event,
                "time_ms": float(event["time_ms"]),
                "metadata": event["metadata"] or {},
                "key": event["key"],
            }
        except (ValueError, KeyError, TypeError):
            raise DataError(
                f"{path}, line {number} is no event of MLPerf's: JSON with time_ms, key, value and metadata is "
                "expected; a run that was killed may have cut it short."
            ) from None


def _value(events: Iterable[Mapping[str, Any]], key: str) -> Any:
    return next((event["value"] for event in events if event["key"] == key), None)


def _throughput(events: Iterable[Mapping[str, Any]]) -> float | None:
    tracked = [event["value"] for event in events if event["key"] == "tracked_stats"]
    named = [value.get("throughput", value.get("imgs_sec")) for value in tracked if isinstance(value, dict)]
    rates = [rate for rate in named if rate is not None]
    rates = sorted(rates[1:] or rates)
    return float(rates[len(rates) // 2]) if rates else None
