"""Whether a replay does what the eager step does: both from the same state, everything that they change compared."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

TIMES_THE_NOISE = 4.0
"""Kernels that add in no fixed order give other bits each time. A replay may differ from an eager step by this many
times what two eager steps differ from each other, tensor by tensor."""

NOTHING_BUT_NOISE = 0.1
"""Relative difference of two eager steps above which a tensor holds rounding alone: the gradient of a bias before a
normalization is zero in exact arithmetic. It tells nothing of a replay, nor of the noise of others."""


@dataclass(frozen=True)
class Difference:
    """One tensor that came out differently."""

    name: str
    largest: float
    """Largest absolute difference; NaN against a number counts as infinite."""
    relative: float
    """Norm of the difference over the norm of the eager result."""

    def __str__(self) -> str:
        return f"{self.name} differs by up to {self.largest:.3g} (relative {self.relative:.3g})"


class Snapshot:
    """Copies of named tensors, to compare with or to go back to."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the copies back into the tensors of the same names, in place."""
        for name, copied in self.copies.items():
            tensors[name].detach().copy_(copied)

    def differences(self, tensors: Mapping[str, Tensor]) -> dict[str, Difference]:
        """Return the tensors that are not equal to their copies bit for bit (NaN equals NaN), worst first."""
        found = []
        for name, copied in self.copies.items():
            now = tensors[name].detach()
            if not torch.equal(now, copied) and not _same_bits_or_nan(now, copied):
                found.append(_difference(name, now, copied))
        return {each.name: each for each in sorted(found, key=lambda each: -each.relative)}


def beyond_noise(replayed: Mapping[str, Difference], noise: Mapping[str, Difference]) -> Difference | None:
    """Return the worst difference of a replay that the differences of two eager steps do not explain, if there is one.

    A tensor may differ by `TIMES_THE_NOISE` its own noise, or by that of nine tensors in ten if its own is smaller: one
    pair of steps is a small sample. Where two eager steps agree bit for bit in everything, the replay must, too.
    """
    known = sorted(each.relative for each in noise.values() if each.relative <= NOTHING_BUT_NOISE)
    common = known[len(known) * 9 // 10] if known else 0.0
    for each in replayed.values():
        own = noise[each.name].relative if each.name in noise else 0.0
        if own <= NOTHING_BUT_NOISE and each.relative > TIMES_THE_NOISE * max(own, common):
            return each
    return None


@dataclass(frozen=True)
class Verdict:
    """What a check found."""

    unexplained: Difference | str | None = None
    """The worst, or a sentence where another process found one."""
    worst_noise: float = 0.0
    """Largest relative difference between two eager steps; looked for where the replay was not equal bit for bit."""
    was_made: bool = True
    """False where there was no memory for it."""


def compare_replay(
    tensors: Callable[[], Mapping[str, Tensor]],
    eager: Callable[[], None],
    replay: Callable[[], None],
    anyone: Callable[[bool], bool] = bool,
) -> Verdict:
    """Run `eager` and `replay` from the state in which `tensors` are now, and compare.

    The replay's state stays; the eager step's, if the replay's is not explained.

    Args:
        tensors: named state: everything that the step changes, its outputs included.
        eager: does the step; must restore the state of random numbers itself, as must `replay`.
        replay: does the captured step.
        anyone: with several processes, whether it is true on any of them. Steps call collectives, so that all
            processes must run the same number of them, and all keep the same state.
    """
    before = _snapshot(tensors)
    if anyone(before is None):
        replay()
        return Verdict(was_made=False)
    assert before is not None
    after_eager = _run(eager, tensors)
    before.restore(tensors())
    replay()
    if anyone(after_eager is None):
        return Verdict(was_made=False)
    assert after_eager is not None
    differing = after_eager.differences(tensors())
    if not anyone(bool(differing)):
        return Verdict()
    after_replay = _snapshot(tensors)
    if anyone(after_replay is None):
        return Verdict(was_made=False)
    assert after_replay is not None
    before.restore(tensors())
    eager()
    noise = after_eager.differences(tensors())
    unexplained: Difference | str | None = beyond_noise(differing, noise)
    if not anyone(unexplained is not None):
        after_replay.restore(tensors())
    elif unexplained is None:
        unexplained = "another process found a difference"
    told = [each.relative for each in noise.values() if each.relative <= NOTHING_BUT_NOISE]
    return Verdict(unexplained, max(told, default=0.0))


def _snapshot(tensors: Callable[[], Mapping[str, Tensor]]) -> Snapshot | None:
    """Return None where there is no memory for it."""
    try:
        return Snapshot(tensors())
    except torch.OutOfMemoryError:
        return None


def _run(eager: Callable[[], None], tensors: Callable[[], Mapping[str, Tensor]]) -> Snapshot | None:
    try:
        eager()
        return Snapshot(tensors())
    except torch.OutOfMemoryError:
        return None


def _same_bits_or_nan(one: Tensor, other: Tensor) -> bool:
    if not (one.is_floating_point() or one.is_complex()):
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _difference(name: str, now: Tensor, expected: Tensor) -> Difference:
    wide = torch.complex128 if now.is_complex() else torch.float64
    difference = (now.to(wide) - expected.to(wide)).abs()
    difference = torch.where(difference.isnan(), torch.inf, difference)
    norm = float(expected.to(wide).norm())
    size = float(difference.norm())
    return Difference(name, float(difference.max()), size / norm if norm > 0 and norm == norm else float("inf"))
