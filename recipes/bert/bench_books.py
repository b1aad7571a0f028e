"""A small BERT on real text to an accuracy of masked words: the same training padded, packed, captured and in FP8."""

import gc
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Timer

from fasttrain.bench import Case
from fasttrain.config import TargetConfig
from fasttrain.errors import ConfigError, nearest
from fasttrain.measure import Row, make_row
from fasttrain.recipes.bert.bench_fit import ENCODER_IN_FP8, GRAPH, PreparedData, Variant, fit_with
from fasttrain.recipes.bert.config import BertConfig
from fasttrain.recipes.bert.data import BertData, DataConfig
from fasttrain.recipes.bert.kept import STAMP
from fasttrain.recipes.bert.module import BertTraining, TrainingConfig
from fasttrain.recipes.bert.optimizer import OptimizerConfig
from fasttrain.target import StopAtTarget

VARIABLE = "FASTTRAIN_CLASSIC_BOOKS"
CASE = "classic_books"
MAX_LENGTH = 192
"""The sequences that books give, a paragraph a document, fill about half of it."""
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
    """All that is the same for every variant."""

    target: float = 0.30
    """Share of masked words that are predicted."""
    steps: int = 3000
    """After which the learning rate is 0."""
    every: int = 200
    """Steps between two evaluations, as many sequences as a padded run has in them."""
    batch_size: int = 256
    """Sequences a step; packed rows hold as many on average."""
    seconds: float = 60.0
    """Of a run, at most."""
    stop: bool = True
    """At the target; else runs go on to the end of the schedule."""
    lr: float = 1e-3
    warmup_steps: int = 200
    sizes: Mapping[str, Any] = field(default_factory=lambda: SIZES)
    """Of the model."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the data's configuration."""


@dataclass(frozen=True)
class Run:
    """What came of one training. Seconds are from the call of `Trainer.fit` on; steps' weights are those scored."""

    seconds_to_target: float | None
    """Until the score was known that reached it; None if none did."""
    steps_to_target: int | None
    seconds: float
    steps: int
    scores: Sequence[tuple[int, float]]
    """(step, accuracy) of each evaluation."""


def cases() -> list[Case]:
    """Return the case."""
    what = f"small BERT on books (folder in ${VARIABLE}) to an accuracy of masked words, padded, packed, in a graph"
    return [Case("bert", CASE, what, to_target, needs_gpu=True)]


def to_target(
    *, variants: str = EVERY_VARIANT, seeds: str = "0 1 2", target: float = Training.target,
    steps: int = Training.steps, every: int = Training.every, seconds: float = Training.seconds, stop: int = 1,
    vocabulary: str = "",
) -> Iterator[Row]:  # fmt: skip
    """Yield seconds and steps to the accuracy, variant by variant.

    Args:
        variants: with spaces between.
        seeds: of weights, order and masks, with spaces between.
        target: share of masked words that are predicted.
        steps: of the schedule, which ends there.
        every: steps from one evaluation to the next.
        seconds: of each run, at most.
        stop: 1 ends a run at the target; 0 goes on to the schedule's end, and yields the accuracy there too.
        vocabulary: vocab.txt for a folder of text; without one WordPiece is trained on it.

    Raises:
        ConfigError: no such variant, or no folder.
    """
    training = Training(target, steps, every, seconds=seconds, stop=bool(stop))
    folder = prepared(vocabulary)
    for variant in chosen(variants):
        # What is compiled and read for the first time is not of this comparison.
        train(variant, folder, 0, replace(training, steps=12, every=6, stop=False))
        yield from rows_of(variant, folder, [int(seed) for seed in seeds.split()], training)


def chosen(names: str) -> list[Variant]:
    """Return the variants of these names.

    Raises:
        ConfigError: there is none of that name.
    """
    by_name = {variant.name: variant for variant in VARIANTS}
    for name in names.split():
        if name not in by_name:
            raise ConfigError(f"bench option variants names '{name}'; {nearest(name, by_name)}")
    return [by_name[name] for name in names.split()]


def prepared(vocabulary: str = "", **options: Any) -> Path:
    """Return the folder of the sequences, which the recipe's data module makes of text once.

    Args:
        vocabulary: see `to_target`.
        options: more fields of the data's configuration.

    Raises:
        ConfigError: nobody has said where the text is.
    """
    given = os.environ.get(VARIABLE)
    if not given or not Path(given).is_dir():
        found = f"which is '{given}' and no folder" if given else "which is not set"
        raise ConfigError(
            f"bert/{CASE} trains on the books that {VARIABLE} names, {found}; set it to a folder of .txt or .md files, "
            "or to sequences that this recipe has made of them."
        )
    if (Path(given) / STAMP).is_file():
        return Path(given)
    config = DataConfig(text=given, text_format="paragraphs", vocabulary=vocabulary or None, max_length=MAX_LENGTH)
    data = BertData(replace(config, **options))
    data.prepare_data()
    assert data.folder is not None
    return data.folder


def books_of(folder: Path, seed: int, training: Training) -> BertData:
    """Return the data of a run, opened: the same sequences for all seeds, which decide about order and masks."""
    options: dict[str, Any] = {"val_batch_size": 256, "val_sequences": 2048, **training.data}
    data = PreparedData(folder, DataConfig(
        max_length=MAX_LENGTH, max_predictions=29, batch_size=training.batch_size, seed=seed, **options
    ))  # fmt: skip
    data.setup("fit")
    return data


def module_of(data: BertData, training: Training) -> BertTraining:
    """Return the model with its schedule. It has no dropout: these runs are short."""
    model = BertConfig(
        data.vocab_size, max_positions=MAX_LENGTH, hidden_dropout=0.0, attention_dropout=0.0, **training.sizes
    )
    optimizer = OptimizerConfig(
        "adamw", training.lr, (0.9, 0.98), warmup_steps=training.warmup_steps, total_steps=training.steps
    )
    return BertTraining(TrainingConfig(model, optimizer, training.batch_size * training.every))


def train(variant: Variant, folder: Path, seed: int, training: Training) -> Run:
    """Train once."""
    pl.seed_everything(seed, verbose=False)
    data = books_of(folder, seed, training)
    module = module_of(data, training)
    target = StopAtTarget(TargetConfig("mlm_accuracy", training.target, "max", training.stop))
    limit = Timer(timedelta(seconds=training.seconds), verbose=False)
    begin = time.perf_counter()
    target.moment = lambda: {"seconds": time.perf_counter() - begin}
    trainer = fit_with(variant, module, data, [target, limit], max_steps=training.steps, gradient_clip_val=1.0)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds, steps, reached = time.perf_counter() - begin, trainer.global_step, target.reached_at
    del trainer, module, data
    gc.collect()  # a captured step holds its memory until then
    if reached is None:
        return Run(None, None, seconds, steps, target.scores)
    return Run(reached["seconds"], int(reached["step"]), seconds, steps, target.scores)


def rows_of(variant: Variant, folder: Path, seeds: Sequence[int], training: Training) -> Iterator[Row]:
    """Train a variant with each seed, and yield its rows.

    Rows to the target are those of the runs that reached it; the note counts them.
    """
    runs = [train(variant, folder, seed, training) for seed in seeds]
    data = books_of(folder, 0, training)
    lengths = data.sequences("train").lengths()
    reached = [run for run in runs if run.seconds_to_target is not None]
    note = (
        f"{', '.join(variant.rooms) or 'no room'}; mlm_accuracy {training.target} on a schedule of {training.steps} "
        f"steps of {training.batch_size} sequences, evaluated every {training.every}; {data.vocab_size} words, "
        f"{len(lengths)} sequences fill {lengths.mean() / MAX_LENGTH:.1%} of {MAX_LENGTH} tokens; reached by "
        f"{len(reached)} of {len(runs)}, seeds {' '.join(map(str, seeds))}; last scores {' '.join(map(_last, runs))}"
    )
    if reached:
        to_it = [run.seconds_to_target for run in reached if run.seconds_to_target is not None]
        yield make_row("bert", CASE, variant.name, "seconds_to_target", "s", to_it, note)
        steps = [run.steps_to_target for run in reached if run.steps_to_target is not None]
        yield make_row("bert", CASE, variant.name, "steps_to_target", "", steps, note)
    yield make_row("bert", CASE, variant.name, "seconds", "s", [run.seconds for run in runs], note)
    whole = [run.scores[-1][1] for run in runs if run.scores and run.steps == training.steps]
    if whole and not training.stop:
        yield make_row("bert", CASE, variant.name, "mlm_accuracy", "", whole, note)


def _last(run: Run) -> str:
    return f"{run.scores[-1][1]:.4f} at {run.scores[-1][0]}" if run.scores else "none"
