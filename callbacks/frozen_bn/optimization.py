"""When fused frozen batch norm applies, and its two doors: a Lightning callback and the plan's optimization."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from torch import nn

from fasttrain.callbacks.frozen_bn.fold import why_not_frozen
from fasttrain.callbacks.frozen_bn.sites import FrozenBNSurgery, fused_sites, why_no_site
from fasttrain.errors import OptimizationError
from fasttrain.measure import AUTOCAST, StepProbe, ms_text
from fasttrain.optimization import Applies, Attachment, Change, Context, Optimization, Refuses, Stage, Verdict


@dataclass(frozen=True)
class FrozenBNConfig:
    """How frozen_bn decides."""

    measure: bool = True
    """Time the training step with and without first, on this machine, and refuse where it is not faster."""
    least_gain: float = 0.02
    """The share of step time that must be saved; below it the difference is noise."""


class FusedFrozenBN(pl.Callback):
    """Fuses frozen batch normalization with ReLU and residual addition: `Trainer(callbacks=[FusedFrozenBN()])`.

    Acts before the optimizer is made, on torchvision's residual blocks, on neighbours in an nn.Sequential, and on
    children of other modules whose forward can be traced. `undo()` puts the old modules back.

    Raises:
        OptimizationError: at `setup`, when the model has no such place; in training, when a BatchNorm2d that was in
            eval mode is put into training mode.
    """

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self._surgeries: list[FrozenBNSurgery] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Replace the modules."""
        surgery = FrozenBNSurgery(pl_module)
        # At a second stage, or with a second Trainer, they are replaced already.
        if not fused_sites(pl_module) and not any(done.model is pl_module for done in self._surgeries):
            raise OptimizationError(f"frozen_bn: {why_no_site(pl_module)}; leave it out.")
        if changes := surgery.apply():
            self.changes = changes
            self._surgeries.append(surgery)

    def undo(self) -> None:
        """Put the old modules back, in every module that this callback has changed."""
        for surgery in reversed(self._surgeries):
            surgery.undo()
        self._surgeries.clear()


class FrozenBNOptimization(Optimization[FrozenBNConfig]):
    """The plan's door."""

    name: ClassVar[str] = "frozen_bn"
    summary: ClassVar[str] = "frozen batch norm folded once, in one pass with ReLU and the residual addition"
    config_class: ClassVar[type[Any]] = FrozenBNConfig
    stage: ClassVar[Stage] = Stage.MODEL
    grade = "same numbers"
    after: ClassVar[frozenset[str]] = frozenset({"channels_last"})

    def __init__(self, config: FrozenBNConfig) -> None:
        super().__init__(config)
        self.callback = FusedFrozenBN()

    def check(self, context: Context) -> Verdict:
        """Refuse where there is nothing to fuse, or where the step measures no faster."""
        sites = len(fused_sites(context.module))
        if not sites:
            return Refuses(why_no_site(context.module))
        if not self.config.measure:
            return Applies(f"{sites} sites; not measured, as asked{_layout(context)}")
        if context.example is None:
            return Refuses("there is no batch to measure with; set optimizations.frozen_bn.measure=false to trust")
        try:
            plain, ours = _compared(context, context.example())
        except OptimizationError as error:
            return Refuses(f"{error}; set optimizations.frozen_bn.measure=false to use it unmeasured")
        times = f"{ms_text(ours)} ms a step against {ms_text(plain)}"
        gain = 1 - ours / plain
        if gain < self.config.least_gain:
            return Refuses(f"not faster here: {times} ({gain:+.0%}, at least {self.config.least_gain:+.0%} wanted)")
        return Applies(f"{sites} sites; measured {times} ({plain / ours:.2f} times){_layout(context)}")

    def attach(self, context: Context) -> Attachment:
        """Hand over the callback."""
        return Attachment(callbacks=[self.callback])

    def applied(self) -> Sequence[Change]:
        """Return the modules replaced."""
        return self.callback.changes


def _layout(context: Context) -> str:
    return "" if "channels_last" in context.asked_for else "; made for channels_last, which is not asked for"


def _compared(context: Context, batch: Any) -> tuple[float, float]:
    """Return milliseconds of the plain step and of the fused one, in the memory format that the run will have."""
    module = copy.deepcopy(context.module)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d) and why_not_frozen(part) is None:
            vars(part)["train"] = _stays_as_it_is  # the probe puts its copies into training mode
    if "channels_last" in context.asked_for:
        module.to(memory_format=torch.channels_last)

    def fuse(copied: pl.LightningModule, batch: Any) -> Any:
        FrozenBNSurgery(copied).apply()
        return batch

    probe = StepProbe(module, batch, context.hardware.device)
    plain, ours = probe.compare(fuse, AUTOCAST.get(context.precision))
    return plain.median_ms, ours.median_ms


def _stays_as_it_is(mode: bool = True) -> None:
    """Take the place of `train` in a module."""
