"""How dedicated evaluation ranks are configured."""

from dataclasses import dataclass

from fasttrain.errors import ConfigError


@dataclass(frozen=True)
class EvaluationRanksConfig:
    """The parameters of `EvaluationRanks`."""

    eval_ranks: int = 1
    """Processes, the last ones, that evaluate and don't train."""
    early_wait: int = 0
    """Batches that training goes on before it waits for a score, in the first epochs; 0 is as many as there are before
    the next evaluation."""
    early_epochs: int = 0
    """How many epochs that is; best those up to the last drop of the learning rate."""
    late_wait: int = 0
    """The same batches for all later epochs."""
    find_unused_parameters: bool = False
    """DDP's own: parameters that a step may leave without a gradient are looked for."""
    timeout_seconds: float = 1800.0
    """After which an evaluation counts as hung."""
    dead_after_seconds: float = 40.0
    """After which a process that gives no sign of life counts as dead."""
    threads: int | None = None
    """Threads that scoring may use; null is half of the usable cores."""

    def __post_init__(self) -> None:
        least = {"eval_ranks": 1, "early_wait": 0, "early_epochs": 0, "late_wait": 0, "threads": 1}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise ConfigError(f"optimizations.evaluation_ranks.{name} is {value}; it must be at least {smallest}.")
        for name in ("timeout_seconds", "dead_after_seconds"):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"optimizations.evaluation_ranks.{name} is {value}; it must be more than 0.")
