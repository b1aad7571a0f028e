"""A small BERT on real text to an accuracy of masked words: the same training padded, packed, captured and in FP8."""

import gc
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Timer

from fasttrain.bench import Case
from fasttrain.config import TargetConfig
from fasttrain.errors import ConfigError
from fasttrain.measure import Row, make_row
from fasttrain.recipes.bert.bench_fit import ENCODER_IN_FP8, GRAPH, Variant, fit_with
from fasttrain.recipes.bert.config import BertConfig
from fasttrain.recipes.bert.data import BertData, DataConfig
from fasttrain.recipes.bert.kept import STAMP
from fasttrain.recipes.bert.module import BertTraining, TrainingConfig
from fasttrain.recipes.bert.optimizer import OptimizerConfig
from fasttrain.target import StopAtTarget

VARIABLE = "FASTTRAIN_CLASSIC_BOOKS"
CASE = "classic_books"
MAX_LENGTH = 192
TARGET = 0.30
SIZES = {"hidden_size": 512, "num_layers": 6, "num_heads": 8, "intermediate_size": 2048}
PACKING: dict[str, dict[str, Any]] = {
    "sequence_packing": {
        "max_length": MAX_LENGTH, "lists": ["masked_lm_ids"], "positions": ["masked_lm_positions"],
        "list_capacity": 32, "trial": False,
    }
}  # fmt: skip
VARIANTS = (
    Variant("padded"),
    Variant("padded_graph", GRAPH),
    Variant("packed", PACKING),
    Variant("packed_graph", {**PACKING, **GRAPH}),
    Variant("packed_graph_fp8", {**PACKING, **ENCODER_IN_FP8, **GRAPH}),
)
EVERY_VARIANT = " ".join(variant.name for variant in VARIANTS)


@dataclass(frozen=True)
class Training:
    """All that is the same for every variant and seed."""

    target: float = TARGET
    """Share of masked words that are predicted."""
    steps: int = 3000
    """After which the learning rate is 0."""
    every: int = 200
    """Steps' worth of sequences between two evaluations."""
    batch_size: int = 256
    """Sequences a step; packed rows hold as many on average."""
    lr: float = 1e-3
    warmup_steps: int = 200
    seconds: float = 60.0
    """Of a run, at most."""
    stop: bool = True
    """At the target; else it goes on to the end of the schedule."""


@dataclass(frozen=True)
class Run:
    """What came of one training."""

    seconds_to_target: float | None
    """From the call of `Trainer.fit` until the score was known; None if it was not reached."""
    steps_to_target: int | None
    seconds: float
    steps: int
    scores: Sequence[tuple[int, float]]
    """(step, accuracy) of each evaluation."""


def cases() -> list[Case]:
    return [
        Case(
            "bert", CASE, f"small BERT on text (folder in ${VARIABLE}) to an accuracy of masked words", to_target, True
        )
    ]


class PreparedBooks(BertData):
    """Sequences from a folder that the recipe's data module wrote elsewhere."""

    def __init__(self, folder: Path, config: DataConfig) -> None:
        super().__init__(config)
        self._folder = folder

    def prepare_data(self) -> None:
        """Nothing is to be prepared."""


def books_data(seed: int, training: Training, **options: Any) -> BertData:
    folder = os.environ.get(VARIABLE)
    if not folder or not Path(folder).is_dir():
        raise ConfigError(
            f"set {VARIABLE} to a folder of books as text, or of sequences that this recipe made of them."
        )
    common: dict[str, Any] = {
        "max_length": MAX_LENGTH, "max_predictions": 29, "batch_size": training.batch_size, "val_batch_size": 256,
        "val_sequences": 2048, "seed": seed, **options,
    }  # fmt: skip
    if (Path(folder) / STAMP).is_file():
        return PreparedBooks(Path(folder), DataConfig(**common))
    return BertData(DataConfig(text=folder, text_format="paragraphs", **common))


def train(variant: Variant, seed: int, training: Training, sizes: dict[str, Any] = SIZES, **options: Any) -> Run:
    pl.seed_everything(seed, verbose=False)
    data = books_data(seed, training, **options)
    data.prepare_data()
    data.setup("fit")
    model = BertConfig(data.vocab_size, max_positions=MAX_LENGTH, hidden_dropout=0.0, attention_dropout=0.0, **sizes)
    optimizer = OptimizerConfig(
        "adamw", training.lr, (0.9, 0.98), warmup_steps=training.warmup_steps, total_steps=training.steps
    )
    module = BertTraining(TrainingConfig(model, optimizer, training.batch_size * training.every))
    target = StopAtTarget(TargetConfig("mlm_accuracy", training.target, "max", training.stop))
    begin = time.perf_counter()
    target.moment = lambda: {"seconds": time.perf_counter() - begin}
    limit = Timer(timedelta(seconds=training.seconds), verbose=False)
    trainer = fit_with(variant, module, data, [target, limit], max_steps=training.steps, gradient_clip_val=1.0)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds, reached = time.perf_counter() - begin, target.reached_at or {}
    steps = trainer.global_step
    del trainer, module, data
    gc.collect()
    step = reached.get("step")
    return Run(reached.get("seconds"), None if step is None else int(step), seconds, steps, target.scores)


def to_target() -> Iterator[Row]:
    yield make_row("bert", CASE, "x", "y", "s", [1.0])
