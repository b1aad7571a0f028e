"""BERT's training with evaluations in between is captured once for each kind of batch."""

from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch

from fasttrain.callbacks import CUDAGraphStep
from fasttrain.recipes.bert.bench_fit import PreparedData
from fasttrain.recipes.bert.config import BertConfig
from fasttrain.recipes.bert.data import DataConfig
from fasttrain.recipes.bert.masking import Masking
from fasttrain.recipes.bert.module import BertTraining, TrainingConfig
from fasttrain.recipes.bert.sequences import StoredSequences, writing

WORDS, LONGEST = 60, 32


def test_an_evaluation_changes_nothing_that_a_captured_step_has_built_in(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for split in ("train", "val"):
        with writing(tmp_path / split, WORDS) as writer:
            for length in random.integers(4, LONGEST + 1, 40).tolist():
                writer.add(random.integers(5, WORDS, length), length // 2, length % 2)
    small = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 32, "max_positions": LONGEST}
    torch.manual_seed(0)
    module = BertTraining(TrainingConfig(BertConfig(vocab_size=WORDS, **small)))  # type: ignore[arg-type]
    data = PreparedData(tmp_path, DataConfig(batch_size=8, max_length=LONGEST, max_predictions=5, num_workers=0))
    masking = Masking(4, (2, 3), WORDS, most=5)
    data._sets = {split: StoredSequences(tmp_path / split, masking) for split in ("train", "val")}
    data.setup = lambda stage: None  # type: ignore[method-assign]
    graph = CUDAGraphStep(stand_in=True, warm_up=2)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=3, callbacks=[graph], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    assert trainer.callback_metrics["mlm_accuracy"] >= 0
    assert graph.pool.captures == 1
    assert not graph.notes
