"""Sequences a second of BERT-large in `Trainer.fit`, data included: plain, and with one optimization more each time."""

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from numpy.typing import NDArray

from fasttrain.bench import Case
from fasttrain.callbacks.cuda_graph_step.bench_ranks import RankWork, two_gpus
from fasttrain.callbacks.sequence_packing.bench import generated_lengths
from fasttrain.measure import Row, make_row
from fasttrain.recipes.bert import bench_books
from fasttrain.recipes.bert.bench_fit import ENCODER_IN_FP8, GRAPH, PreparedData, Variant, fit_with
from fasttrain.recipes.bert.config import BertConfig
from fasttrain.recipes.bert.data import DataConfig
from fasttrain.recipes.bert.masking import Masking
from fasttrain.recipes.bert.module import BertTraining, TrainingConfig
from fasttrain.recipes.bert.optimizer import OptimizerConfig
from fasttrain.recipes.bert.sequences import StoredSequences, writing
from fasttrain.recorder import SampleCounter, sample_counter

SEQUENCES, VOCABULARY = 40_000, 30522
PACKING: dict[str, dict[str, Any]] = {
    "sequence_packing": {
        "lists": ["masked_lm_ids"], "positions": ["masked_lm_positions"], "list_capacity": 80, "trial": False,
    }
}  # fmt: skip
ROOMS: dict[str, dict[str, Any]] = {
    **PACKING,
    "gemm_gelu": {"measure": False},
    "layer_norm_dropout": {"measure": False},
}
FP8: dict[str, dict[str, Any]] = {
    **PACKING,
    **ENCODER_IN_FP8,
    "layer_norm_dropout": {"measure": False},
}
COMPILE: dict[str, dict[str, Any]] = {"compile": {"measure": False, "dynamic": False}}
UNFUSED = {"attention": "dense", "fused_qkv": False, "dense_sequence_output": False}

VARIANTS = (
    Variant("plain", {}, UNFUSED),
    Variant("padded_varlen"),
    Variant("packed_dense", PACKING, {"attention": "dense"}),
    Variant("packed", PACKING),
    Variant("packed_compile", {**PACKING, **COMPILE}),
    Variant("packed_rooms", ROOMS),
    Variant("packed_graph", {**PACKING, **GRAPH}),
    Variant("packed_compile_graph", {**PACKING, **COMPILE, **GRAPH}),
    Variant("ours", {**ROOMS, **GRAPH}, optimizer={"fused": None}),
    Variant("ours_fp8", {**FP8, **GRAPH}, optimizer={"fused": None}),
)
EVERY_VARIANT = ",".join(variant.name for variant in VARIANTS)
BY_COUNT = Variant(
    "packed_graph_by_count", {"sequence_packing": {**PACKING["sequence_packing"], "static": False}, **GRAPH}
)
"""A graph for each number of sequences in the batch, as the submission has it: of 2 rows there are five."""


def cases() -> list[Case]:
    """Return the recipe's bench cases."""
    large = "BERT-large at 512 tokens in Trainer.fit"
    return [
        Case("bert", "large_512", f"{large}, 56 sequences a step", large_512, True),
        Case("bert", "large_512_rows2", f"{large}, 2 packed rows a step: eager against graph", large_512_rows2, True),
        Case(
            "bert",
            "two_gpus",
            f"{large}, 56 sequences a step and GPU: two GPUs against one",
            lambda: two_gpus("bert", f"{__name__}:rank_work"),
            needs_gpu=True,
        ),
        *bench_books.cases(),
    ]


def rank_work(rows: int = 56, **model: Any) -> RankWork:
    """Return what each GPU trains on in `two_gpus`: full rows, so that each step is the same work.

    Args:
        rows: in a batch.
        model: sizes, where they are not BERT-large's.
    """
    torch.manual_seed(0)
    config = BertConfig(**{"vocab_size": VOCABULARY, **model})
    with Corpus(np.full(2 * rows, config.max_positions)) as folder:
        data = CorpusData(folder, DataConfig(batch_size=rows, num_workers=0, max_length=config.max_positions))
        data.setup("fit")
        batches = list(data.train_dataloader())
    module = BertTraining(TrainingConfig(config, OptimizerConfig(total_steps=6700)))
    return RankWork(module, batches, rows, f"BERT-large, {config.max_positions} tokens, {rows} full rows a GPU, LAMB")


def large_512(*, variants: str = EVERY_VARIANT, batch_size: int = 56) -> Iterator[Row]:
    """Yield rates of variants on lengths like Wikipedia's; `large_512_b112` is the case of 112 sequences a step."""
    case = "large_512" if batch_size == 56 else f"large_512_b{batch_size}"
    with Corpus(generated_lengths(SEQUENCES)) as folder:
        for variant in (each for each in VARIANTS if each.name in variants.split(",")):
            yield from rate_rows(variant, folder, case, batch_size=batch_size)


def large_512_rows2(*, variants: str = "packed,packed_rooms,packed_graph,packed_graph_by_count,ours") -> Iterator[Row]:
    """Yield rates at the batch of MLPerf's largest runs, 2 packed rows for each GPU, where launches take the time."""
    with Corpus(generated_lengths(SEQUENCES // 10)) as folder:
        for variant in (each for each in (*VARIANTS, BY_COUNT) if each.name in variants.split(",")):
            # Rare numbers of sequences have graphs of their own to be captured first.
            yield from rate_rows(variant, folder, "large_512_rows2", batch_size=4, warm_up=64, size=16)


def rate_rows(variant: Variant, folder: Path, case: str = "large_512", **options: Any) -> Iterator[Row]:
    """Yield sequences a second, ms a step and TFLOP/s of useful work of a variant."""
    windows = fit_windows(variant, folder, **options)
    choices = "".join(f", {key}={value}" for key, value in {**variant.model, **variant.optimizer}.items())
    note = f"bf16, LAMB, Trainer.fit with data; {', '.join(variant.rooms) or 'no room'}{choices}"
    rates = [window.sequences / window.seconds for window in windows]
    yield make_row("bert", case, variant.name, "sequences_per_second", "1/s", rates, note)
    times = [1e3 * window.seconds / window.steps for window in windows]
    yield make_row("bert", case, variant.name, "step_ms", "ms", times, note)
    work = [rate * sequence_flops(folder) / 1e12 for rate in rates]
    yield make_row("bert", case, variant.name, "tflops", "TFLOP/s", work, note)


@dataclass(frozen=True)
class Window:
    """Some steps one behind another."""

    steps: int
    sequences: int
    seconds: float


class Windows(pl.Callback):
    """Times windows of steps, synchronized at their ends; stops when it has them all."""

    def __init__(self, warm_up: int, size: int, count: int) -> None:
        self.warm_up, self.size, self.count = warm_up, size, count
        self.sequences = 0
        self.count_of: SampleCounter | None = None
        self.marks: list[tuple[float, int]] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, i: int
    ) -> None:
        """Note time and sequences where a window ends."""
        if self.count_of is None:
            self.count_of = sample_counter(trainer, module)
        self.sequences = self.count_of(batch, self.sequences)
        step = trainer.global_step - self.warm_up
        if step >= 0 and step % self.size == 0 and len(self.marks) <= self.count:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.marks.append((time.perf_counter(), self.sequences))
        if len(self.marks) > self.count:
            trainer.should_stop = True

    def windows(self) -> list[Window]:
        """Return what was timed."""
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [Window(self.size, n1 - n0, t1 - t0) for (t0, n0), (t1, n1) in pairs]


def fit_windows(
    variant: Variant, folder: Path, *, model: Mapping[str, Any] | None = None, batch_size: int = 56, warm_up: int = 16,
    size: int = 8, count: int = 5, workers: int | None = None, callbacks: Sequence[pl.Callback] = (),
) -> list[Window]:  # fmt: skip
    """Fit a variant and return windows of `size` steps.

    Args:
        folder: a corpus, see `Corpus`.
        model: sizes, where they are not BERT-large's.
        batch_size: sequences a step; packed rows hold about as many.
        callbacks: more of them.
    """
    torch.manual_seed(0)
    config = BertConfig(**{"vocab_size": VOCABULARY, **(model or {}), **variant.model})
    module = BertTraining(TrainingConfig(config, OptimizerConfig(**{"total_steps": 6700, **variant.optimizer})))
    data = CorpusData(folder, DataConfig(batch_size=batch_size, num_workers=workers, max_length=config.max_positions))
    windows = Windows(warm_up, size, count)
    limits = {"max_steps": warm_up + size * count + 1, "limit_val_batches": 0, "log_every_n_steps": size}
    fit_with(variant, module, data, [windows, *callbacks], **limits)
    return windows.windows()


class Corpus:
    """A folder with sequences of random words, for as long as it is open.

    Args:
        lengths: (sequences,) tokens of each.
    """

    def __init__(self, lengths: NDArray[Any]) -> None:
        self.lengths = lengths
        self._folder = tempfile.TemporaryDirectory(prefix="bert-bench-")

    def __enter__(self) -> Path:
        random = np.random.default_rng(0)
        folder = Path(self._folder.name)
        with writing(folder, VOCABULARY) as writer:
            for length in self.lengths.tolist():
                tokens = random.integers(1000, VOCABULARY, length)
                writer.add(tokens, max(1, length // 2), int(tokens[0]) % 2)
        return folder

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()


class CorpusData(PreparedData):
    """A corpus as the recipe's data."""

    def setup(self, stage: str) -> None:
        """Open the files; validation is never asked for."""
        masking = Masking(103, (101, 102), VOCABULARY, most=self.config.max_predictions)
        stored = StoredSequences(self.folder, masking)
        self._sets = {"train": stored, "val": stored}


def sequence_flops(folder: Path) -> float:
    """Return the matrix products' work of BERT-large's step for a sequence of a corpus, on average, without padding."""
    lengths = StoredSequences(folder, None).lengths().astype(np.float64)
    hidden, layers, words = 1024, 24, 30528
    by_token = 2 * 12 * hidden**2 * layers * lengths
    attention = 4 * lengths**2 * hidden * layers
    predicted = np.minimum(76, np.maximum(1, np.round(0.15 * lengths)))
    heads = 2 * (hidden**2 + hidden * words) * predicted + 2 * hidden**2
    return float(3 * (by_token + attention + heads).mean())
