"""How the recipe's benches train: a module with some rooms on, planned as a run is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from fasttrain.callbacks import CATALOGUE
from fasttrain.config import TrainerConfig
from fasttrain.environment import Hardware
from fasttrain.optimization import Context, ExampleBatch
from fasttrain.plan import Plan, data_module, make_plan, requested
from fasttrain.recipes.bert.data import BertData, DataConfig
from fasttrain.trainer import make_trainer

Rooms = Mapping[str, Mapping[str, Any]]
GRAPH: dict[str, dict[str, Any]] = {"cuda_graph_step": {"warm_up": 4}}
ENCODER_IN_FP8: dict[str, dict[str, Any]] = {"fp8_linear": {"measure": False, "leave": ("*.cls.*", "*.pooler.*")}}


@dataclass(frozen=True)
class Variant:
    """What is on: rooms, and choices of the model and of the optimizer."""

    name: str
    rooms: Rooms = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)


class PreparedData(BertData):
    """Sequences of a folder that was written before.

    Args:
        folder: see `BertData.folder`.
    """

    def __init__(self, folder: Path, config: DataConfig) -> None:
        super().__init__(config)
        self.folder: Path = folder

    def prepare_data(self) -> None:
        """Nothing is to be prepared."""


def planned(
    variant: Variant, module: pl.LightningModule, data: pl.LightningDataModule, hardware: Hardware
) -> tuple[Plan, Context]:
    """Return what a run with a variant's rooms would do on some hardware: in bf16 on a GPU."""
    precision = "bf16-mixed" if hardware.kind == "gpu" else "32-true"
    wanted, off = requested(dict(variant.rooms), CATALOGUE)
    context = Context(module, data, hardware, precision, frozenset(each.name for each in wanted), ExampleBatch(data))
    return make_plan(wanted, context, off), context


def fit_with(
    variant: Variant,
    module: pl.LightningModule,
    data: pl.LightningDataModule,
    callbacks: Sequence[pl.Callback],
    **limits: Any,
) -> pl.Trainer:
    """Fit with a variant's rooms, and return the Trainer.

    Args:
        limits: fields of `TrainerConfig`.

    Raises:
        RuntimeError: a room does not apply here; without it the variant would be another.
    """
    hardware = Hardware.here()
    plan, context = planned(variant, module, data, hardware)
    if plan.refused:
        raise RuntimeError(f"{variant.name}: {[(e.optimization.name, e.verdict) for e in plan.refused]}")
    attachments = plan.attach(context)
    config = TrainerConfig(accelerator=hardware.kind, precision=context.precision, max_epochs=-1, **limits)
    trainer = make_trainer(config, attachments, list(callbacks), [], enable_progress_bar=False)
    trainer.fit(module, datamodule=data_module(attachments, data))
    return trainer
