"""The BERT recipe through the whole flow, on the CPU: scores, counts of sequences, evaluation by samples, resume."""

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from rich.console import Console

from fasttrain.callbacks import CATALOGUE
from fasttrain.callbacks.optimizers import LAMB
from fasttrain.errors import ConfigError
from fasttrain.evaluation import EvaluateEvery
from fasttrain.fit import Outcome, fit
from fasttrain.mlperf.projection import bert_interval
from fasttrain.recipe import find_recipe, resolve
from fasttrain.recipes.bert.config import BertConfig
from fasttrain.recipes.bert.data import BertData, DataConfig
from fasttrain.recipes.bert.module import BertTraining, TrainingConfig
from fasttrain.recipes.bert.optimizer import OptimizerConfig, learning_rate_factor, make_optimizer
from fasttrain.recipes.bert.sequences import StoredSequences
from fasttrain.recorder import RunRecorder

pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts that go on as they began, of one to eight sentences."""
    folder = tmp_path_factory.mktemp("stories")
    for number in range(40):
        noun = ["cat", "dog", "bird", "fish"][number % 4]
        lines = [f"The {noun} of house {number % 7} likes number {line}." for line in range(1 + number % 8)]
        (folder / f"{number:02}.txt").write_text(" ".join(lines))
    return folder


def tiny(stories: Path) -> list[str]:
    return [
        f"data.text={stories}",
        f"data.cache_folder={stories.parent / 'cache'}",
        "data.vocab_size=90", "data.max_length=48", "data.max_predictions=7",
        "data.val_share=0.2",
        "data.batch_size=8", "data.num_workers=0", "module.model.hidden_size=32", "module.model.num_layers=1",
        "module.model.intermediate_size=64", "module.model.num_heads=2", "module.optimizer.warmup_steps=2",
        "optimizations.sequence_packing.list_capacity=10", "trainer.max_epochs=2", "trainer.log_every_n_steps=1",
        "target.value=1.1", "loggers=[]", "module.evaluate_every_samples=null",
    ]  # fmt: skip


def run(run_dir: Path, *overrides: str, resume: Path | None = None) -> Outcome:
    recipe = resume / "config.yaml" if resume else find_recipe("bert")
    console = Console(file=open(os.devnull, "w"))  # noqa: SIM115
    resolved = resolve(recipe, list(overrides))
    return fit(resolved, CATALOGUE, run_dir=None if resume else run_dir, resume=resume, console=console)


def values(folder: Path, name: str) -> list[tuple[int, float]]:
    """Return (step, value) of what was logged under a name."""
    rows = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()[1:]]
    return [(int(row[0]), float(row[4])) for row in rows if row[3] == name]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, stories: Path) -> Outcome:
    return run(tmp_path_factory.mktemp("packed") / "run", *tiny(stories))


def test_a_run_counts_sequences_and_scores_masked_words(packed: Outcome, stories: Path, tmp_path: Path) -> None:
    assert packed.result["status"] == "finished"
    padded = run(tmp_path / "padded", *tiny(stories), "optimizations=none", "data.batch_size=16")
    (folder,) = (stories.parent / "cache").glob("bert-*")
    sequences = len(StoredSequences(folder / "train", None))
    assert packed.result["samples"] == 2 * sequences, "every sequence twice, in rows of up to three"
    assert padded.result["samples"] == 2 * 16 * (sequences // 16)
    for outcome in (packed, padded):
        for name in ("mlm_accuracy", "nsp_accuracy"):
            assert all(0 <= value <= 1 for _, value in values(outcome.folder, name))
        losses = [value for _, value in values(outcome.folder, "mlm_loss")]
        assert losses[-1] < losses[0]


def test_a_stopped_run_goes_on_exactly(
    packed: Outcome, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, stop = RunRecorder.on_train_batch_end, packed.result["steps"] // 2 + 1

    def interrupt(self: RunRecorder, trainer: Any, *rest: Any) -> None:
        count(self, trainer, *rest)
        if trainer.global_step == stop:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(RunRecorder, "on_train_batch_end", interrupt)
    parts = run(tmp_path / "parts", *tiny(stories))
    assert (parts.result["status"], parts.result["steps"]) == ("interrupted", stop)
    monkeypatch.undo()
    rest = run(tmp_path, resume=tmp_path / "parts")
    assert rest.result["samples"] == packed.result["samples"]
    assert values(rest.folder, "loss") == values(packed.folder, "loss")
    assert values(rest.folder, "mlm_accuracy") == values(packed.folder, "mlm_accuracy")


def test_evaluation_by_samples(packed: Outcome, stories: Path, tmp_path: Path) -> None:
    every = 10
    outcome = run(tmp_path / "run", *tiny(stories), f"module.evaluate_every_samples={every}")
    assert outcome.result["samples"] == packed.result["samples"]
    evaluations = values(outcome.folder, "mlm_accuracy")
    steps, samples = packed.result["steps"], packed.result["samples"]
    assert steps / 2 < len(evaluations) <= min(samples // every, steps)
    assert len(evaluations) > len(values(packed.folder, "mlm_accuracy")) == 2
    with pytest.raises(ConfigError, match=r"^an evaluation every 0 samples was asked for; it must be at least 1\.$"):
        EvaluateEvery(0)


def test_mlperfs_interval() -> None:
    by_batch = {256: 150_000, 448: 150_000, 2048: 150_000, 3072: 175_000, 4096: 175_000, 8192: 225_000, 16384: 325_000}
    assert {batch: bert_interval(batch) for batch in by_batch} == by_batch


def test_the_learning_rate_is_mlperfs() -> None:
    # NVIDIA's for 4096 sequences: 256 steps of warm-up from -76 on, down to 0 at 820.
    factor = learning_rate_factor(256, -76, 820)
    assert factor(0) == pytest.approx(77 / 256)
    assert factor(178) == pytest.approx(255 / 256)
    assert factor(179) == pytest.approx(1 - 180 / 820), "the decay does not know of the shift"
    assert factor(819) == factor(2000) == 0
    assert learning_rate_factor(0, 0, 100)(0) == pytest.approx(0.99)
    assert learning_rate_factor(0, 0, 100, power=2)(49) == pytest.approx(0.25)


def small(**options: Any) -> BertTraining:
    sizes = {"vocab_size": 30, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "intermediate_size": 8}
    return BertTraining(TrainingConfig(BertConfig(**sizes), OptimizerConfig(**options)))  # type: ignore[arg-type]


def test_biases_and_norms_are_left_to_themselves() -> None:
    module = small(name="lamb", total_steps=10)
    optimizer = make_optimizer(module, module.config.optimizer, 10)["optimizer"]
    assert isinstance(optimizer, LAMB)
    free = {id(p) for p in optimizer.param_groups[1]["params"]}
    names = {name for name, p in module.named_parameters() if id(p) in free}
    assert names == {n for n, _ in module.named_parameters() if n.endswith("bias") or "LayerNorm" in n}
    assert optimizer.param_groups[1]["weight_decay"] == 0
    assert not optimizer.param_groups[1]["adapt"]
    adamw = make_optimizer(module, OptimizerConfig("adamw"), 10)["optimizer"]
    assert isinstance(adamw, torch.optim.AdamW)
    with pytest.raises(
        ConfigError, match=r"^module\.optimizer\.total_steps is not set, and the run has no end at which"
    ):
        make_optimizer(module, OptimizerConfig(), float("inf"))


def test_the_score_is_over_all_words(stories: Path) -> None:
    data = BertData(DataConfig(text=str(stories), vocab_size=90, max_length=48, max_predictions=7, batch_size=4,
                               val_batch_size=3, num_workers=0, val_share=0.3))  # fmt: skip
    data.prepare_data()
    data.setup("fit")
    sizes = BertConfig(data.vocab_size, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=16)
    module = BertTraining(TrainingConfig(sizes))
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False)
    trainer = pl.Trainer(accelerator="cpu", **quiet)  # type: ignore[arg-type]
    (scores,) = trainer.validate(module, data, verbose=False)
    right = words = 0
    with torch.no_grad():
        for sample in data.sequences("val"):  # type: ignore[attr-defined]
            logits = module.model(sample["input_ids"][None], token_type_ids=sample["token_type_ids"][None])[0][0]
            right += int((logits[sample["masked_lm_positions"]].argmax(-1) == sample["masked_lm_ids"]).sum())
            words += len(sample["masked_lm_ids"])
    assert scores["mlm_accuracy"] == pytest.approx(right / words)
