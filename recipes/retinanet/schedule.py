"""The learning rate over the steps of a run, as a factor of its full value."""

import math
from collections.abc import Callable


def learning_rate_factor(
    warmup_steps: int, warmup_factor: float, schedule: str, total_steps: float
) -> Callable[[int], float]:
    """Return step (from 0) -> factor.

    Linear from `warmup_factor` to 1 over `warmup_steps` (MLPerf v2.0's RetinaNet), then 1, or with `cosine` down to
    0 at `total_steps`.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return warmup_factor + (1 - warmup_factor) * step / warmup_steps
        if schedule == "constant":
            return 1.0
        progress = (step - warmup_steps) / max(1.0, total_steps - warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    return factor
