"""Whether a training step gets faster by a change: measured as the run will be, and said in the plan's words."""

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch

from fasttrain.errors import OptimizationError
from fasttrain.measure import AUTOCAST, StepProbe, Timing, ms_text
from fasttrain.optimization import Applies, Context, Refuses, Verdict


def compare_step(
    context: Context, batch: Any, prepare: Callable[[pl.LightningModule, Any], Any]
) -> tuple[Timing, Timing]:
    """Return the timing of the plain step and of the prepared one, see `StepProbe.compare`.

    In the memory format that the run will have. Where the run will replay its step as a CUDA graph, so do these, if
    the step can be captured.

    Raises:
        OptimizationError: the step does not run outside of a Trainer.
    """
    module = context.module
    if "channels_last" in context.asked_for:
        module = copy.deepcopy(module).to(memory_format=torch.channels_last)
    probe = StepProbe(module, batch, context.hardware.device, in_graph="cuda_graph_step" in context.asked_for)
    return probe.compare(prepare, AUTOCAST.get(context.precision))


def measured(
    context: Context, name: str, measure: Callable[[Any], Verdict], said: Callable[[OptimizationError], str] = str
) -> Verdict:
    """Return what an optimization's `measure` makes of the run's batch; refuse where it can't be measured.

    Args:
        name: of the optimization, whose `measure` the user may set to false.
        measure: takes the batch, on the CPU; may raise OptimizationError where the step doesn't run by itself.
        said: what such an error says in one line.
    """
    unmeasured = f"set optimizations.{name}.measure=false"
    if context.example is None:
        return Refuses(f"there is no batch to measure with; {unmeasured} to trust")
    try:
        return measure(context.example())
    except OptimizationError as error:
        return Refuses(f"{said(error)}; {unmeasured} to use it unmeasured")


def verdict_of(what: str, plain_ms: float, ours_ms: float, least_gain: float, note: str = "") -> Verdict:
    """Return that `what` applies, or refuse it if it saves less than a share of the step; both with both times.

    Args:
        note: is put behind the times where it applies.
    """
    times = f"{ms_text(ours_ms)} ms a step against {ms_text(plain_ms)}"
    gain = 1 - ours_ms / plain_ms
    if gain < least_gain:
        return Refuses(f"not faster here: {times} ({gain:+.0%}, at least {least_gain:+.0%} wanted)")
    return Applies(f"{what}; measured {times} ({plain_ms / ours_ms:.2f} times){note}")
