"""The recipes' result files before MLPerf's own checker: short open runs, and closed ones of the real models."""

import io
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from mlperf_fits import Samples, events, keys, loader, only
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fasttrain.callbacks import CATALOGUE
from fasttrain.config import TargetConfig
from fasttrain.errors import ConfigError
from fasttrain.fit import Outcome, fit
from fasttrain.mlperf.benchmark import Benchmark, find_benchmark
from fasttrain.mlperf.checks import check_compliance
from fasttrain.mlperf.config import SubmissionConfig
from fasttrain.mlperf.logger import MLPerfLogger
from fasttrain.recipe import find_recipe, resolve
from fasttrain.recipes.bert.data import DataConfig as BertDataConfig
from fasttrain.recipes.bert.mlperf import BENCHMARK as BERT
from fasttrain.recipes.bert.module import BertTraining
from fasttrain.recipes.bert.module import TrainingConfig as BertConfig
from fasttrain.recipes.resnet50.mlperf import BENCHMARK as RESNET
from fasttrain.recipes.resnet50.module import ResNetTraining
from fasttrain.recipes.resnet50.module import TrainingConfig as ResNetConfig
from fasttrain.recipes.resnet50.optimizer import OptimizerConfig as ResNetOptimizer
from fasttrain.recipes.retinanet.mlperf import BENCHMARK as RETINANET
from fasttrain.recipes.retinanet.model import RetinaNetConfig
from fasttrain.recipes.retinanet.module import RetinaNetTraining
from fasttrain.recipes.retinanet.module import TrainingConfig as RetinaNetTrainingConfig
from fasttrain.results import RunFolder
from fasttrain.run import prepare
from fasttrain.session import Session
from fasttrain.target import StopAtTarget

with_checker = pytest.mark.skipif(find_spec("mlperf_logging") is None, reason="mlperf-logging is not installed")

TINY = ["mlperf.enabled=true", "seed=3", "optimizations=none", "loggers=[]", "trainer.max_epochs=1"]
RETINANET_TINY = ["data.generated.train_images=8", "data.generated.val_images=2", "data.batch_size=4",
                  "data.image_size=[64, 64]"]  # fmt: skip
RESNET_TINY = [
    "data.generated.train_images=40",
    "data.generated.val_images=20",
    "data.batch_size=10",
    "data.image_size=32",
]


def short_run(recipe: str, folder: Path, *overrides: str) -> Outcome:
    resolved = resolve(find_recipe(recipe), [*TINY, *overrides])
    return fit(resolved, CATALOGUE, run_dir=folder, console=Console(file=io.StringIO()), quiet=True)


# ---- short runs through the whole flow -------------------------------------------------------------------------------


@with_checker
def test_a_short_run_of_retinanet_passes_in_the_open_division(tmp_path: Path) -> None:
    outcome = short_run("retinanet", tmp_path / "run", *RETINANET_TINY, "target.value=0", "mlperf.submission.org=me")
    assert outcome.result["status"] == "reached_target"
    file = tmp_path / "run" / "result_3.txt"  # the seed
    assert check_compliance(file).passed
    assert (only(file, "submission_org")["value"], only(file, "submission_division")["value"]) == ("me", "open")
    assert (only(file, "train_samples")["value"], only(file, "eval_samples")["value"]) == (8, 2)
    assert only(file, "global_batch_size")["value"] == 4
    assert only(file, "opt_name")["value"] == "adamw", "the small preset's, which a closed run may not have"
    assert only(file, "run_stop")["metadata"] == {"status": "success", "epoch_num": 1}


@with_checker
def test_a_short_run_of_resnet50_that_misses_its_target_is_told_as_aborted(tmp_path: Path) -> None:
    short_run("resnet50", tmp_path / "run", *RESNET_TINY, "mlperf.result=0")
    file = tmp_path / "run" / "result_0.txt"
    assert check_compliance(file).passed, "an open run may miss its target"
    assert only(file, "run_stop")["metadata"] == {"status": "aborted"}
    assert only(file, "sgd_opt_learning_rate_decay_steps")["value"] == 4
    assert keys(file).count("weights_initialization") == only_count("resnet10")


def only_count(arch: str) -> int:
    with torch.device("meta"):
        return len(list(ResNetTraining(ResNetConfig(_model(arch))).parameters()))


def _model(arch: str) -> Any:
    from fasttrain.recipes.resnet50.model import ResNetConfig as ModelConfig

    return ModelConfig(arch=arch)  # type: ignore[arg-type]


def test_what_a_recipe_must_say_first(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the recipe 'retinanet' names no benchmark; set mlperf.benchmark"):
        short_run("retinanet", tmp_path / "a", *RETINANET_TINY, "mlperf.benchmark=null")
    with pytest.raises(ConfigError, match=r"target of ssd is 0.34, but target.value is 0.1, which is easier"):
        short_run("retinanet", tmp_path / "b", *RETINANET_TINY, "target.value=0.1", "mlperf.submission.division=closed")
    resolved = resolve(find_recipe("retinanet"), [*TINY, *RETINANET_TINY, "mlperf.submission.division=closed"])
    prepared = prepare(resolved, CATALOGUE)
    assert prepared.context.example is not None
    prepared.context.example()  # as a check does that measures
    session = Session(resolved, RunFolder.create(tmp_path / "c", "retinanet"), Console(), True, 0.0)
    with pytest.raises(ConfigError, match="a batch of training data, and in the closed division none may be read"):
        session.train(prepared, None)
    with pytest.raises(ConfigError, match=r"mlperf.result is -1; files are numbered from 0"):
        resolve(find_recipe("bert"), ["mlperf.result=-1"])
    with pytest.raises(ConfigError, match="has no 'BENCHMARKS'; did you mean 'BENCHMARK'"):
        find_benchmark("fasttrain.recipes.bert.mlperf.BENCHMARKS")
    with pytest.raises(ConfigError, match=r"is a function, not a fasttrain.mlperf.benchmark.Benchmark"):
        find_benchmark("fasttrain.recipes.bert.mlperf.tensors")


# ---- closed runs: the real models, whose weights take no memory, and a score that is there at once -------------------


class Pretends(pl.LightningModule):
    """Has a recipe's module to be asked about, trains something else, and scores what it is told."""

    def __init__(self, real: pl.LightningModule, metric: str, score: float) -> None:
        super().__init__()
        self.real = (real,)  # in a tuple: its weights, on the meta device, can't be moved
        self.metric, self.score = metric, score
        self.net = nn.Linear(2, 1)

    @property
    def config(self) -> Any:
        return self.real[0].config

    @property
    def model(self) -> Any:
        return self.real[0].model

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None: ...

    def on_validation_epoch_end(self) -> None:
        self.log(self.metric, torch.tensor(self.score, dtype=torch.float64))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Data(pl.LightningDataModule):
    config = BertDataConfig()

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Samples(64), batch_size=32)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return loader(2)


def retinanet() -> RetinaNetTraining:
    return RetinaNetTraining(RetinaNetTrainingConfig(RetinaNetConfig(norm="frozen", trainable_layers=3)))


def resnet50() -> ResNetTraining:
    return ResNetTraining(ResNetConfig())


def resnet50_sgd() -> ResNetTraining:
    optimizer = ResNetOptimizer(name="sgd", lr=3.2, lr_for_batch=None, weight_decay=1e-4)
    return ResNetTraining(ResNetConfig(optimizer=optimizer))


def bert() -> BertTraining:
    return BertTraining(BertConfig())


REAL = {"ssd": (retinanet, RETINANET, 89), "resnet": (resnet50, RESNET, 161), "resnet sgd": (resnet50_sgd, RESNET, 161),
        "bert": (bert, BERT, 398)}  # fmt: skip


def closed_run(file: Path, real: Any, benchmark: Benchmark, score: float) -> MLPerfLogger:
    with torch.device("meta"):
        module = real()
    logger = MLPerfLogger(benchmark, file, SubmissionConfig("me", "1xH200", "closed", "onprem"))
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[logger, StopAtTarget(TargetConfig(benchmark.metric, benchmark.target))],
    )  # fmt: skip
    trainer.fit(Pretends(module, benchmark.metric, score), datamodule=Data())
    return logger


@with_checker
@pytest.mark.parametrize("name", REAL)
def test_a_closed_run_of_the_real_model_passes_if_it_reaches_the_target(name: str, tmp_path: Path) -> None:
    real, benchmark, count = REAL[name]
    closed_run(tmp_path / "result_0.txt", real, benchmark, benchmark.target)
    assert keys(tmp_path / "result_0.txt").count("weights_initialization") == count
    verdict = check_compliance(tmp_path / "result_0.txt", benchmark.ruleset)
    assert verdict.reasons == ()
    assert verdict.passed


@with_checker
def test_the_rules_that_a_closed_run_breaks_are_named(tmp_path: Path) -> None:
    file = tmp_path / "result_0.txt"
    assert closed_run(file, retinanet, RETINANET, 0.339).status == "aborted"
    assert check_compliance(file).reasons == (
        "Failed checks for eval_accuracy : v['value'] >= 0.340 and v['value'] < 1.0",
    )
    lines = file.read_text().replace('"value": "adam"', '"value": "sgd"').splitlines()
    kept = [line for line in lines if "cls_logits.bias" not in line and '"opt_weight_decay"' not in line]
    file.write_text("\n".join(kept))
    reasons = "\n".join(check_compliance(file).reasons)
    for rule in ("opt_name: v['value'] == 'adam'", "weights_initialization: the tensors are not those of the benchmark",
                 "Required EXACTLY_ONE occurrence of 'opt_weight_decay' but found 0"):  # fmt: skip
        assert rule in reasons


def test_hyperparameters_are_the_configurations_own(tmp_path: Path) -> None:
    closed_run(tmp_path / "r.txt", resnet50, RESNET, 0.759)
    values = {e["key"]: e["value"] for e in events(tmp_path / "r.txt") if "opt_" in e["key"] or "batch" in e["key"]}
    assert values == {
        "global_batch_size": 32,
        "opt_name": "lars",
        "lars_opt_base_learning_rate": 10.5 * (408 / 3264) ** 0.5,  # one process of the eight that it is for
        "lars_opt_end_learning_rate": 1e-4,
        "lars_opt_learning_rate_decay_poly_power": 2,
        "lars_opt_learning_rate_decay_steps": 4,
        "lars_opt_momentum": 0.9,
        "lars_opt_weight_decay": 5e-5,
        "lars_opt_learning_rate_warmup_epochs": 2.0,
    }
    closed_run(tmp_path / "b.txt", bert, BERT, 0.72)
    assert only(tmp_path / "b.txt", "opt_learning_rate_training_steps")["value"] == 4
    assert only(tmp_path / "b.txt", "global_batch_size")["value"] == 56, "sequences, whatever the rows"
    assert only(tmp_path / "b.txt", "eval_accuracy")["metadata"] == {"epoch_num": 64}
