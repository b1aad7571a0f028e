"""The `mlperf` section of a run's configuration."""

from dataclasses import dataclass, field
from typing import Literal

from fasttrain.errors import ConfigError


@dataclass
class SubmissionConfig:
    """Who would submit the result: `submission_*` in its file."""

    org: str = "not submitted"
    platform: str | None = None
    """The system; null is the number of processes and the accelerator's name."""
    division: Literal["open", "closed"] = "open"
    """`closed` holds the run to the benchmark's own model, hyperparameters and target."""
    status: Literal["cloud", "onprem", "preview", "research"] = "research"


@dataclass
class MLPerfConfig:
    """Whether and how a run writes MLPerf Training's result file."""

    enabled: bool = False
    """Write result_N.txt into the run folder."""
    benchmark: str | None = None
    """Dotted path of the `fasttrain.mlperf.benchmark.Benchmark` that the run is an attempt at."""
    result: int | None = None
    """N of result_N.txt; null is the seed."""
    clear_cache: bool = False
    """Have Linux drop its cache of files before the run, as submissions do; only root may. The file says whether."""
    submission: SubmissionConfig = field(default_factory=SubmissionConfig)

    def __post_init__(self) -> None:
        if isinstance(self.result, int) and self.result < 0:
            raise ConfigError(f"mlperf.result is {self.result}; files are numbered from 0, or by the seed with null.")
