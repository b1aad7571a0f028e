"""Other packages' operators beside ours in a bench: only where a trial in a process of its own has shown them right."""

import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fasttrain.capture import captured
from fasttrain.proving import Trial, prove

TINY = torch.finfo(torch.float64).tiny


def runs_beside(trial: Trial) -> bool:
    """Whether a peer may take part in a comparison on this machine. If not, a warning says why it has no row."""
    proof = prove(trial)
    if not proof.ok:
        warnings.warn(f"no row of a peer: {proof.reason}", stacklevel=2)
    return proof.ok


def assert_right(
    compute: Callable[[], Sequence[Tensor]], wanted: Mapping[str, Tensor], tolerance: float, in_graph: bool = True
) -> None:
    """Compare what a peer computes with its reference: called once, and on a GPU replayed from a CUDA graph, too.

    Args:
        compute: returns the tensors in the order of `wanted`, of any dtype.
        wanted: float64, by what they are.
        tolerance: largest difference allowed, over the largest magnitude of each tensor of the reference.
        in_graph: whether the bench replays it.

    Raises:
        AssertionError: a tensor is further off, or not finite.
    """
    kept: list[Tensor] = []

    def step() -> None:
        kept[:] = compute()

    runs: dict[str, Callable[[], None]] = {"": step}
    if in_graph and torch.cuda.is_available():
        runs[" in a replay"] = captured(step)
    for how, run in runs.items():
        run()
        for (name, right), found in zip(wanted.items(), kept, strict=True):
            error = float((found.double() - right).abs().max() / right.abs().max().clamp(min=TINY))
            if not error <= tolerance:
                raise AssertionError(
                    f"{name}{how} is off by {error:.1e} of its largest magnitude, at most {tolerance:.0e} is allowed"
                )
