"""Small fits that write MLPerf's result file, and reading what is in it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fasttrain.config import TargetConfig
from fasttrain.mlperf.benchmark import Benchmark
from fasttrain.mlperf.lines import ResultFile
from fasttrain.mlperf.logger import MLPerfLogger
from fasttrain.mlperf.result import TOKEN
from fasttrain.target import StopAtTarget

TOY = Benchmark("ssd", metric="mean", target=4.0, hyperparameters=lambda run: {"opt_name": "sgd"})


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(TOKEN)) for line in path.read_text().splitlines()]


def keys(path: Path, *leave_out: str) -> list[str]:
    return [event["key"] for event in events(path) if event["key"] not in leave_out]


def only(path: Path, key: str) -> dict[str, Any]:
    (event,) = [event for event in events(path) if event["key"] == key]
    return event


class Samples(Dataset[Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((2,), float(index))


class Module(pl.LightningModule):
    """Scores the number of its steps, in the validation or elsewhere."""

    def __init__(self, function: str = "mean", truth: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.function, self.truth, self.rows = function, truth or {}, list[NDArray[np.float64]]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch / 10).square().mean()
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.rows.append(np.full((1, 1), float(self.global_step)))

    def on_validation_epoch_end(self) -> None:
        self.log("mean", torch.tensor(float(np.concatenate(self.validation_rows()).mean())))

    def validation_rows(self) -> Sequence[NDArray[Any]]:
        rows, self.rows = self.rows, []
        return rows

    def ground_truth(self) -> dict[str, Any]:
        return self.truth

    def score_function(self) -> str:
        return f"score_functions:{self.function}"

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader(count: int, **options: Any) -> DataLoader[Tensor]:
    return DataLoader(Samples(count), batch_size=2, **options)


def toy_fit(
    path: Path, *callbacks: pl.Callback, module: pl.LightningModule | None = None, target: float | None = None,
    benchmark: Benchmark = TOY, train: DataLoader[Tensor] | None = None, epochs: int = 3, **options: Any,
) -> MLPerfLogger:  # fmt: skip
    """Fit, two steps an epoch, an evaluation after each; with a target, `StopAtTarget` judges, else the logger."""
    logger = MLPerfLogger(benchmark, path, seed=7)
    judges = [StopAtTarget(TargetConfig(benchmark.metric, target))] if target is not None else []
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=epochs, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=[logger, *judges, *callbacks], **options,
    )  # fmt: skip
    trainer.fit(module or Module(), loader(4) if train is None else train, loader(2))
    return logger


def write_result(path: Path, seconds: float, epochs: float, *, status: str = "success", score: float = 0.35) -> Path:
    """Write a closed RetinaNet result of 8 x 32 images a step, that took so long and so many epochs."""
    file = ResultFile(path)
    start = 1_700_000_000_000
    values = {"benchmark": "ssd", "org": "me", "division": "closed", "status": "research", "platform": "8xGPU"}
    file.event("cache_clear", True, time_ms=start)
    file.event("init_start", time_ms=start)
    for key, value in values.items():
        file.event(f"submission_{key}", value, time_ms=start)
    file.event("global_batch_size", 256, time_ms=start)
    file.event("init_stop", time_ms=start + 5000)
    file.event("run_start", time_ms=start + 5000)
    file.event("epoch_start", time_ms=start + 5000, epoch_num=1)
    for rate in (100.0, 300.0, 301.0, 302.0):
        file.event("tracked_stats", {"throughput": rate}, time_ms=start + 6000)
    file.event("eval_accuracy", score, time_ms=start + 7000, epoch_num=epochs)
    file.event("run_stop", time_ms=start + 5000 + round(seconds * 1000), status=status)
    file.open()
    file.close()
    return path
