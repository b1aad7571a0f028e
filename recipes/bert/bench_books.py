"""A small BERT on real text to an accuracy of masked words: the same training padded, packed, captured and in FP8."""

import gc
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
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

    target: float = 0.34
    """Share of masked words that are predicted."""
    steps: int = 1500
    """After which the learning rate is 0."""
    every: int = 100
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
class Score:
    """One evaluation."""

    step: int
    """Whose weights were scored."""
    seconds: float
    """From the call of `Trainer.fit` until the score was known."""
    accuracy: float


@dataclass(frozen=True)
class Run:
    """What came of one training."""

    scores: Sequence[Score]
    steps: int
    seconds: float
    """From the call of `Trainer.fit` until it returned."""

    def first(self, target: float) -> Score | None:
        """Return the first score that reached a target."""
        return next((score for score in self.scores if score.accuracy >= target), None)


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
        runs = {seed: train(variant, folder, seed, training) for seed in map(int, seeds.split())}
        yield from rows_of(variant, runs, folder, training)


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
    scores: list[Score] = []
    target = StopAtTarget(TargetConfig("mlm_accuracy", training.target, "max", training.stop))
    target.listeners.append(lambda score, step: scores.append(Score(step, time.perf_counter() - begin, score)))
    limit = Timer(timedelta(seconds=training.seconds), verbose=False)
    begin = time.perf_counter()
    trainer = fit_with(variant, module, data, [target, limit], max_steps=training.steps, gradient_clip_val=1.0)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    run = Run(scores, trainer.global_step, time.perf_counter() - begin)
    del trainer, module, data
    gc.collect()  # a captured step holds its memory until then
    return run


def rows_of(variant: Variant, by_seed: Mapping[int, Run], folder: Path, training: Training) -> Iterator[Row]:
    """Yield the rows of a variant's runs.

    Rows to the target are those of the runs that reached it; the note counts them.
    """
    runs = list(by_seed.values())
    data = books_of(folder, 0, training)
    lengths = data.sequences("train").lengths()
    reached = [score for run in runs if (score := run.first(training.target)) is not None]
    note = (
        f"{', '.join(variant.rooms) or 'no room'}; mlm_accuracy {training.target} on a schedule of {training.steps} "
        f"steps of {training.batch_size} sequences, evaluated every {training.every}; {data.vocab_size} words, "
        f"{len(lengths)} sequences fill {lengths.mean() / MAX_LENGTH:.1%} of {MAX_LENGTH} tokens; reached by "
        f"{len(reached)} of {len(runs)}, seeds {' '.join(map(str, by_seed))}; last scores {' '.join(map(_last, runs))}"
    )
    row = partial(make_row, "bert", CASE, variant.name, note=note)
    if reached:
        yield row("seconds_to_target", "s", [score.seconds for score in reached])
        yield row("steps_to_target", "", [score.step for score in reached])
    yield row("seconds", "s", [run.seconds for run in runs])
    if not training.stop and all(run.scores and run.steps == training.steps for run in runs):
        yield row("mlm_accuracy", "", [run.scores[-1].accuracy for run in runs])


def _last(run: Run) -> str:
    return f"{run.scores[-1].accuracy:.4f} at {run.scores[-1].step}" if run.scores else "none"
