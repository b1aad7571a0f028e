"""The body: which precisions a device can run, and which of them makes a given training step fastest."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch

from fasttrain.environment import Hardware
from fasttrain.measure import AUTOCAST, StepProbe, Timing


@dataclass(frozen=True)
class Candidate:
    """A precision under Lightning's name, and the type that autocast uses for it (None: full fp32)."""

    name: str
    autocast: torch.dtype | None


FP32 = Candidate("32-true", None)
BF16 = Candidate("bf16-mixed", AUTOCAST["bf16-mixed"])
FP16 = Candidate("16-mixed", AUTOCAST["16-mixed"])


def candidates_for(hardware: Hardware, allowed: Sequence[str]) -> list[Candidate]:
    """Return fp32 and those of the allowed precisions that the device has fast units for, as far as it says.

    fp16 needs tensor cores (compute capability 7.0), bf16 those of Ampere (8.0). A CPU may or may not have bf16 matrix
    units; timing decides.
    """
    found = [FP32]
    capability = hardware.capability
    if BF16.name in allowed and (capability is None or capability >= (8, 0)):
        found.append(BF16)
    if FP16.name in allowed and capability is not None and capability >= (7, 0):
        found.append(FP16)
    return found


def fastest_precision(
    module: pl.LightningModule, batch: Any, hardware: Hardware, allowed: Sequence[str] = ("bf16-mixed", "16-mixed")
) -> list[tuple[Candidate, Timing]]:
    """Time forward and backward of the module's training step in each precision; return them, fastest first.

    The module, its batch and the random state are left as they were: copies are timed. fp16's loss scaling, which
    costs one pass over the gradients, is not part of the timing.

    Args:
        module: with a `training_step` that runs outside of a Trainer.
        batch: as the step takes it, on any device.
        hardware: whose device they are moved to.
        allowed: Lightning's names of those to try beside fp32; see `candidates_for`.

    Raises:
        OptimizationError: the step does not run outside of a Trainer.
    """
    probe = StepProbe(module, batch, hardware.device)
    timed = [(candidate, probe(autocast=candidate.autocast)) for candidate in candidates_for(hardware, allowed)]
    return sorted(timed, key=lambda pair: pair[1].median_ms)
