"""A fit of a recipe that is there to be measured: as configured, on one device, without evaluation or a run folder."""

import time
from collections.abc import Sequence
from dataclasses import replace

import lightning.pytorch as pl
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from fasttrain.plan import data_module
from fasttrain.recorder import RunRecorder
from fasttrain.run import Prepared
from fasttrain.step_clock import StepClock
from fasttrain.trainer import make_trainer


def fit_to_measure(
    prepared: Prepared, recorder: RunRecorder, clock: StepClock, callbacks: Sequence[pl.Callback]
) -> None:
    """Apply the plan and train until one of the callbacks stops it.

    Args:
        prepared: the recipe and its plan, not applied yet.
        recorder: of the same plan; fails the fit if an optimization that applies changes nothing.
        clock: the Trainer's profiler.
        callbacks: come after the optimizations' and the recorder.
    """
    attachments = prepared.plan.attach(prepared.context)
    config = replace(
        prepared.recipe.resolved.run.trainer,
        devices=1, num_nodes=1, strategy="auto", limit_val_batches=0, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer = make_trainer(
        config, attachments, [recorder, *callbacks], [DummyLogger()], profiler=clock, enable_progress_bar=False
    )
    trainer.fit(prepared.recipe.module, datamodule=data_module(attachments, prepared.recipe.data))


def new_recorder(prepared: Prepared, clock: StepClock) -> RunRecorder:
    """Return a recorder that writes nothing."""
    return RunRecorder(prepared.plan, clock, time.perf_counter(), lambda record: None)


def made_ahead(loader: CombinedLoader) -> int:
    """Return how many batches a loader may have made before they were asked for."""
    counts = [
        each.num_workers * (each.prefetch_factor or 0) if isinstance(each, DataLoader) else 4
        for each in loader.flattened
    ]
    return max(counts) + 4 if any(counts) else 0
