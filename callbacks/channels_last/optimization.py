"""When channels_last applies, and its two doors: a Lightning callback and the plan's optimization."""

from dataclasses import dataclass
from typing import Any, ClassVar

import lightning.pytorch as pl

from fasttrain.callback_door import ActingCallback, CallbackOptimization
from fasttrain.callbacks.channels_last.layout import (
    batch_to_channels_last,
    convolutions_to_change,
    images_in,
    is_channels_last,
    to_channels_last,
)
from fasttrain.comparison import measured, verdict_of
from fasttrain.errors import OptimizationError
from fasttrain.measure import AUTOCAST, StepProbe
from fasttrain.optimization import Applies, Context, Refuses, Stage, Verdict
from fasttrain.trainer import transform_batches


@dataclass(frozen=True)
class ChannelsLastConfig:
    """How channels_last decides."""

    measure: bool = True
    """Time the training step in both formats first, on this machine, and refuse where it is not faster."""
    least_gain: float = 0.02
    """The share of step time that must be saved; below it the difference is noise."""


class ChannelsLast(ActingCallback):
    """Trains in channels_last: `Trainer(callbacks=[ChannelsLast()])`.

    Converts the weights of 2-d convolutions once, before the optimizer is made, and each batch after it has reached
    the device. Results are equal up to the rounding of another convolution kernel.

    Raises:
        OptimizationError: at `setup`, when the model has no convolution to which the format makes a difference.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Convert the weights and, from here on, the batches."""
        # At a second stage, or with a second Trainer, the weights are converted already.
        self.changes = to_channels_last(pl_module) or self.changes
        if not is_channels_last(pl_module):
            raise OptimizationError(
                f"channels_last: {type(pl_module).__name__} has no 2-d convolution whose weight would change; leave it "
                "out."
            )
        transform_batches(trainer, batch_to_channels_last)


class ChannelsLastOptimization(CallbackOptimization[ChannelsLastConfig, ChannelsLast]):
    """The plan's door."""

    name: ClassVar[str] = "channels_last"
    summary: ClassVar[str] = "convolutions and image batches in NHWC memory format, where that measures faster"
    config_class: ClassVar[type[Any]] = ChannelsLastConfig
    stage: ClassVar[Stage] = Stage.MODEL
    grade = "same numbers"

    def make_callback(self) -> ChannelsLast:
        """Return the callback."""
        return ChannelsLast()

    def check(self, context: Context) -> Verdict:
        """Refuse where nothing would change, or where the step measures no faster."""
        sites = convolutions_to_change(context.module)
        if not sites:
            return Refuses(f"{type(context.module).__name__} has no 2-d convolution whose weight would change")
        if not self.config.measure:
            return Applies(f"{len(sites)} convolution weights; not measured, as asked")
        return measured(context, self.name, lambda batch: self._compare(context, batch, len(sites)))

    def _compare(self, context: Context, batch: Any, sites: int) -> Verdict:
        if not any(True for _ in images_in(batch)):
            return Refuses("the batch holds no 4-d tensor of two or more channels, so nothing would be fed to it")

        def convert(module: pl.LightningModule, batch: Any) -> Any:
            to_channels_last(module)
            return batch_to_channels_last(batch)

        probe = StepProbe(context.module, batch, context.hardware.device)
        plain, ours = probe.compare(convert, AUTOCAST.get(context.precision))
        what = f"{sites} convolution weights"
        return verdict_of(what, plain.median_ms, ours.median_ms, self.config.least_gain)
