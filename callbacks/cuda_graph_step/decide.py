"""How much of a fit's step can be captured, decided by looking at it before the first one."""

from collections.abc import Collection
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from fasttrain.callbacks.cuda_graph_step.config import Scope
from fasttrain.callbacks.cuda_graph_step.inspection.frozen_reads import frozen_reads, host_effects
from fasttrain.callbacks.cuda_graph_step.inspection.hooks import step_hooks

# Lightning calls these after the backward, so that a step captured without its optimizer calls them every time.
AROUND_THE_OPTIMIZER = ("on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step")


@dataclass(frozen=True)
class Decision:
    """What is to be captured: everything, forward and backward, or nothing; and why not more."""

    scope: Scope | None
    reason: str = ""


def why_no_step_can_be_captured(module: pl.LightningModule, trusted: Collection[str] = ()) -> str | None:
    """Return why a module's `training_step` can't be captured, as far as its code tells without a Trainer, or None."""
    if (reason := _why_not_automatic(module)) is not None:
        return reason
    if f"{type(module).__name__}.training_step" in trusted:
        return None
    found = frozen_reads(module.training_step, module) or host_effects(module.training_step, module)
    return found[0].sentence if found else None


def decide(trainer: pl.Trainer, module: pl.LightningModule, scope: Scope, trusted: Collection[str]) -> Decision:
    """Return how much of the step is captured, from what the user asked for and what stands against it."""
    if reason := _why_not_automatic(module) or _why_not_with(trainer):
        return Decision(None, reason)
    refused = [verdict for verdict in step_hooks(trainer, module, trusted) if not verdict.captured]
    inside = [verdict for verdict in refused if verdict.hook not in AROUND_THE_OPTIMIZER]
    if inside:
        return Decision(None, inside[0].reason)
    if scope == "fwd_bwd":
        return Decision("fwd_bwd", "asked for")
    if refused:
        return Decision("fwd_bwd", refused[0].reason)
    return Decision("step")


def _why_not_automatic(module: pl.LightningModule) -> str | None:
    if module.automatic_optimization:
        return None
    return (
        f"{type(module).__name__} optimizes by itself (automatic_optimization=False); capture its parts with "
        "fasttrain.callbacks.cuda_graph_step.CapturedFunction inside of training_step"
    )


def _why_not_with(trainer: pl.Trainer) -> str | None:
    strategy = trainer.strategy
    if type(strategy) not in (SingleDeviceStrategy, DDPStrategy):
        return (
            f"the strategy {type(strategy).__name__} does more in a step than Lightning's single-device and DDP "
            "strategies, which are known to be captured right"
        )
    if torch.is_anomaly_enabled():
        return "anomaly detection looks at every gradient on the host; set detect_anomaly=False"
    if len(trainer.optimizers) != 1 or isinstance(trainer.optimizers[0], torch.optim.LBFGS):
        return f"{type(trainer.lightning_module).__name__} has no single optimizer that takes one step a batch"
    return None
