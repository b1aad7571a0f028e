"""The scales by which a tensor is brought into an FP8 format's range, kept on the device.

One scale stands for a whole tensor. It comes from the largest magnitude that was seen there: in the same tensor
(`current`, which reads it twice), or lately (`delayed`): `used = max(seen, decay * used)` at each cast. A format of
floating point loses nothing by a scale that is too small, down to its subnormals, and values beyond its range are set
to its largest; so a delayed scale leaves a factor of two for growth.

Formats and delayed scaling: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433.
"""

from collections.abc import MutableSet
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["delayed", "current"]
GradientFormat = Literal["e5m2", "e4m3"]
USED, SEEN, DONE = range(3)
SMALLEST = 1e-30  # of magnitudes, so that a tensor of zeros has a scale


@dataclass(frozen=True)
class Scaling:
    """How scales are found, and which format gradients have; weights and activations have e4m3."""

    kind: Kind = "delayed"
    gradients: GradientFormat = "e5m2"
    decay: float = 0.99
    """Of what was the largest magnitude, at each cast."""
    headroom: float = 2.0
    """By which values may grow from one step to the next before they are set to the format's largest."""

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The format as a dtype."""
        return torch.float8_e5m2 if self.gradients == "e5m2" else torch.float8_e4m3fn


@dataclass
class Scales:
    """The scales of some tensors of a module.

    `values` is int32 (tensors, 3): the magnitude that the scale comes from, the largest seen meanwhile, both as the
    bits of a float32, and how many programs of a kernel are done. As integers they are left alone by `module.half()`,
    and their order is that of the magnitudes.
    """

    values: Tensor
    begun: MutableSet[int]
    """Tensors that have been cast once, by a scale of their own; the others have none yet."""
    scaling: Scaling

    def looks_first(self, index: int) -> bool:
        """Whether the next cast of a tensor reads it first; notes that it has been cast."""
        new = index not in self.begun
        self.begun.add(index)
        return new or self.scaling.kind == "current"

    def largest_of(self, dtype: torch.dtype) -> float:
        """Return what the magnitude that a scale comes from is brought to."""
        headroom = self.scaling.headroom if self.scaling.kind == "delayed" else 1.0
        return torch.finfo(dtype).max / headroom


def no_scales(tensors: int) -> Tensor:
    """Return `Scales.values` of tensors that have not been seen."""
    return torch.zeros(tensors, 3, dtype=torch.int32)
