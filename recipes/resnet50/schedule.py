"""The learning rate over the steps of a run: linear warm-up, then a polynomial, as in MLPerf's ResNet-50."""

from collections.abc import Callable

END_LR = 1e-4  # fixed by MLPerf's rules, lars_opt_end_learning_rate
POWER = 2  # and lars_opt_learning_rate_decay_poly_power


def learning_rate(
    base: float, warmup_steps: int, total_steps: float, end: float = END_LR, power: float = POWER
) -> Callable[[int], float]:
    """Return step (from 0) -> learning rate.

    Steps are counted as in NVIDIA's MXNet submission: the first one has `base / warmup_steps`, number `warmup_steps`
    has `base`, and the last of `total_steps` has `end`:

        lr = end + (base - end) (1 - t / T)^power, t steps after the warm-up of T = total - warm-up

    After `total_steps` it stays at `end`.
    """

    def lr(step: int) -> float:
        count = step + 1
        if count < warmup_steps:
            return base * count / warmup_steps
        decayed: float = (1 - min(1.0, (count - warmup_steps) / max(1.0, total_steps - warmup_steps))) ** power
        return end + (base - end) * decayed

    return lr


def scaled_lr(base: float, batch: int, for_batch: int | None, layerwise: bool) -> float:
    """Return the learning rate for another global batch than the one that `base` is for.

    With LARS it goes with the root of the ratio: MLPerf's reference convergence points for 1,632 and 3,264 images are
    7.4 and 10.5. With SGD it goes with the ratio (Goyal et al., arXiv 1706.02677). None changes nothing.
    """
    if for_batch is None:
        return base
    ratio = batch / for_batch
    return base * (ratio**0.5 if layerwise else ratio)
