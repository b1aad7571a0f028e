"""The two doors of anchor_matching: a Lightning callback and the plan's optimization."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fasttrain.callbacks.anchor_matching.sites import AnchorMatchingPatches
from fasttrain.environment import triton_runs
from fasttrain.optimization import Context, Refuses, Verdict
from fasttrain.patches import PatchCallback, PatchConfig, PatchOptimization


@dataclass(frozen=True)
class AnchorMatchingConfig(PatchConfig):
    """How anchor_matching decides."""


class FusedAnchorMatching(PatchCallback):
    """Matches anchors with real boxes alone, by Triton kernels: `Trainer(callbacks=[FusedAnchorMatching()])`.

    Acts on modules that say they are a matcher (see `sites.ROLE`). `undo()` puts the old ones back.

    Raises:
        OptimizationError: at `setup`, when the model has no such module.
    """

    def __init__(self) -> None:
        super().__init__(AnchorMatchingPatches())


class AnchorMatchingOptimization(PatchOptimization[AnchorMatchingConfig]):
    """The plan's door."""

    name: ClassVar[str] = "anchor_matching"
    summary: ClassVar[str] = "a detector's anchors matched with the real boxes alone, not with the padding"
    config_class: ClassVar[type[Any]] = AnchorMatchingConfig

    def check(self, context: Context) -> Verdict:
        """As every patch; unmeasured, it refuses where the plain matcher would be called."""
        hardware = context.hardware
        has_kernel = torch.device(hardware.device).type == "cuda" and triton_runs()
        if not self.config.measure and not has_kernel:
            return Refuses(f"the run is on {hardware.name}, and its kernels need an NVIDIA GPU and Triton")
        return super().check(context)

    def make_callback(self) -> FusedAnchorMatching:
        """Return the callback."""
        return FusedAnchorMatching()
