"""How scoring beside training is configured."""

from dataclasses import dataclass
from typing import Literal

from fasttrain.errors import ConfigError


@dataclass(frozen=True)
class AsyncScoringConfig:
    """The parameters of `AsyncCOCOScoring`."""

    on_failure: Literal["error", "continue"] = "error"
    """What an evaluation that can't be scored means: an error at the end of the fit, or a warning only."""
    most_in_flight: int = 2
    """Evaluations that may wait or be scored at a time; training waits before there is one more."""
    timeout_seconds: float = 1800.0
    """After which a scoring counts as hung and is ended."""
    niceness: int = 10
    """How far the scoring process stands back behind training's own; 0 for not at all."""
    threads: int | None = None
    """Threads that scoring may use; null is half of the usable cores."""
    poll_every_n_batches: int | None = None
    """Training batches between two looks at what has arrived. Null is 1 in one process, where a look takes a
    microsecond, and 20 in several, as in NVIDIA's submission (see `--async-coco-check-freq` in the README's source)."""

    def __post_init__(self) -> None:
        least = {"most_in_flight": 1, "niceness": 0, "poll_every_n_batches": 1, "threads": 1}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise ConfigError(f"optimizations.async_scoring.{name} is {value}; it must be at least {smallest}.")
        if not self.timeout_seconds > 0:
            raise ConfigError(
                f"optimizations.async_scoring.timeout_seconds is {self.timeout_seconds}; it must be more than 0."
            )
