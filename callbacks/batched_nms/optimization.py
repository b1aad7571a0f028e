"""The two doors of batched_nms: a Lightning callback and the plan's optimization."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fasttrain.callback_door import CallbackOptimization
from fasttrain.callbacks.batched_nms.candidates import random_candidates
from fasttrain.callbacks.batched_nms.sites import BatchedNMSPatches
from fasttrain.environment import triton_runs
from fasttrain.measure import ms_text, time_ms
from fasttrain.optimization import Applies, Context, Refuses, Stage, Verdict
from fasttrain.patches import PatchCallback, PatchConfig, PatchSite, open_sites

MEASURED_IMAGES = 8


@dataclass(frozen=True)
class BatchedNMSConfig(PatchConfig):
    """How batched_nms decides. It is the suppression that is timed, not a training step."""


class FusedBatchedNMS(PatchCallback):
    """Suppresses a whole batch's candidates by one Triton kernel: `Trainer(callbacks=[FusedBatchedNMS()])`.

    Acts on modules that say they suppress (see `sites.ROLE`). `undo()` puts the old ones back.

    Raises:
        OptimizationError: at `setup`, when the model has no such module.
    """

    def __init__(self) -> None:
        super().__init__(BatchedNMSPatches())


class BatchedNMSOptimization(CallbackOptimization[BatchedNMSConfig, FusedBatchedNMS]):
    """The plan's door. No step of training suppresses anything, so it measures the suppression by itself."""

    name: ClassVar[str] = "batched_nms"
    summary: ClassVar[str] = "a detector's candidates suppressed for the whole batch in one kernel, without a wait"
    config_class: ClassVar[type[Any]] = BatchedNMSConfig
    stage: ClassVar[Stage] = Stage.MODEL
    grade = "same numbers"

    def make_callback(self) -> FusedBatchedNMS:
        """Return the callback."""
        return FusedBatchedNMS()

    def check(self, context: Context) -> Verdict:
        """Refuse where there is no suppression or no kernel, or where it measures no faster."""
        patches, hardware = self.callback.patches, context.hardware
        sites = open_sites(context.module, patches, context.taken)
        if not sites:
            return Refuses(patches.why_no_site(context.module))
        if torch.device(hardware.device).type != "cuda" or not triton_runs():
            return Refuses(f"the run is on {hardware.name}, and its kernel and Triton need an NVIDIA GPU")
        if not self.config.measure:
            return Applies(f"{len(sites)} sites; not measured, as asked")
        return self._measured(sites[0], len(sites), torch.device(hardware.device))

    def _measured(self, site: PatchSite, sites: int, device: torch.device) -> Verdict:
        candidates = random_candidates(device, MEASURED_IMAGES)
        fused = site.fused()
        plain_ms = time_ms(lambda: site.plain(*candidates), device).median_ms
        ours_ms = time_ms(lambda: fused(*candidates), device).median_ms
        of = f"for {MEASURED_IMAGES} images of {candidates[1].shape[1]:,} candidates"
        times = f"{ms_text(ours_ms)} ms {of} against {ms_text(plain_ms)}"
        gain = 1 - ours_ms / plain_ms
        if gain < self.config.least_gain:
            return Refuses(f"not faster here: {times} ({gain:+.0%}, at least {self.config.least_gain:+.0%} wanted)")
        return Applies(f"{sites} sites; measured {times} ({plain_ms / ours_ms:.1f} times)")
