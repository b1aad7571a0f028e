"""When the one-pass focal loss applies, and its two doors: a Lightning callback and the plan's optimization."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch

from fasttrain.callback_door import ActingCallback, CallbackOptimization
from fasttrain.callbacks.focal_loss.loss import FocalLoss
from fasttrain.callbacks.focal_loss.sites import ROLE, FocalLossSurgery, loss_sites
from fasttrain.errors import OptimizationError
from fasttrain.optimization import Applies, Context, Refuses, Stage, Verdict


@dataclass(frozen=True)
class FocalLossConfig:
    """How the focal loss is computed."""

    in_place: bool = False
    """Write gradients over the logits: saves their memory; nothing else may read them after the loss."""


class FusedFocalLoss(ActingCallback):
    """Computes a model's focal loss in one pass over its logits: `Trainer(callbacks=[FusedFocalLoss()])`.

    Acts on torchvision's RetinaNet, and on modules that say they are a focal loss (see `sites.ROLE`).
    `undo()` puts the old losses back.

    Raises:
        OptimizationError: at `setup`, when the model has no such loss.
    """

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place
        self._surgeries: list[FocalLossSurgery] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Replace the losses."""
        surgery = FocalLossSurgery(pl_module)
        changes = surgery.apply(lambda alpha, gamma: FocalLoss(alpha, gamma, in_place=self.in_place))
        # At a second stage, or with a second Trainer, they are replaced already.
        if not changes and not any(done.model is pl_module for done in self._surgeries):
            raise OptimizationError(f"focal_loss: {_no_site(pl_module)}; leave it out.")
        if changes:
            self.changes = changes
            self._surgeries.append(surgery)

    def undo(self) -> None:
        """Put the old losses back, in every module that this callback has changed."""
        for surgery in self._surgeries:
            surgery.undo()
        self._surgeries.clear()


class FocalLossOptimization(CallbackOptimization[FocalLossConfig, FusedFocalLoss]):
    """The plan's door."""

    name: ClassVar[str] = "focal_loss"
    summary: ClassVar[str] = "sigmoid focal loss in one pass over the logits that yields loss and gradient"
    config_class: ClassVar[type[Any]] = FocalLossConfig
    stage: ClassVar[Stage] = Stage.MODEL
    grade = "same numbers"

    def make_callback(self) -> FusedFocalLoss:
        """Return the callback."""
        return FusedFocalLoss(self.config.in_place)

    def check(self, context: Context) -> Verdict:
        """Refuse where there is no focal loss to replace."""
        sites = loss_sites(context.module)
        if not sites:
            return Refuses(_no_site(context.module))
        has_kernel = torch.device(context.hardware.device).type == "cuda" and torch.version.hip is None
        if has_kernel and find_spec("triton") is None:
            return Applies(f"{', '.join(sites)}; in plain PyTorch, because Triton is not installed")
        return Applies(f"{', '.join(sites)}; {'Triton kernel' if has_kernel else 'in plain PyTorch'}")


def _no_site(module: pl.LightningModule) -> str:
    return (
        f"{type(module).__name__} has no focal loss to replace: neither torchvision's RetinaNetClassificationHead nor "
        f"a module whose fasttrain_role is '{ROLE}'"
    )
