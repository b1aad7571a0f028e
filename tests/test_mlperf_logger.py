"""MLPerf's result file of fits: events in order, the clock around the data, scores that come late, runs that fail."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from mlperf_fits import TOY, Module, Samples, events, keys, loader, only, toy_fit
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

import fasttrain
from fasttrain.callbacks import AsyncCOCOScoring
from fasttrain.config import TargetConfig
from fasttrain.errors import ConfigError
from fasttrain.mlperf.benchmark import Benchmark
from fasttrain.mlperf.config import SubmissionConfig
from fasttrain.mlperf.logger import MLPerfLogger
from fasttrain.mlperf.page_cache import clear_page_cache
from fasttrain.target import StopAtTarget

CLOSED = SubmissionConfig(division="closed")


@pytest.mark.parametrize("target", [None, 4.0], ids=["the logger judges", "StopAtTarget judges"])
def test_events_of_a_foreign_fit_are_in_order(tmp_path: Path, target: float | None) -> None:
    logger = toy_fit(tmp_path / "result_0.txt", target=target)
    assert keys(tmp_path / "result_0.txt") == [
        "cache_clear", "init_start", "submission_benchmark", "submission_org", "submission_division",
        "submission_status", "submission_platform", "mlperf_ruleset", "global_batch_size",
        "gradient_accumulation_steps", "seed", "opt_name", "init_stop", "run_start", "train_samples", "eval_samples",
        *(2 * ["epoch_start", "epoch_stop", "tracked_stats", "eval_start", "eval_accuracy", "eval_stop"]),
        "run_stop",
    ]  # fmt: skip
    assert logger.status == "success"
    told = events(tmp_path / "result_0.txt")
    assert [e["time_ms"] for e in told] == sorted(e["time_ms"] for e in told)
    assert [e["event_type"] for e in told if e["key"] in ("init_start", "run_stop", "eval_accuracy")] == [
        "INTERVAL_START", "POINT_IN_TIME", "POINT_IN_TIME", "INTERVAL_END",
    ]  # fmt: skip
    assert [(e["value"], e["metadata"]["epoch_num"]) for e in told if e["key"] == "eval_accuracy"] == [
        (2.0, 1),
        (4.0, 2),
    ]
    values = {key: only(tmp_path / "result_0.txt", key)["value"] for key in ("train_samples", "eval_samples", "seed")}
    assert values == {"train_samples": 4, "eval_samples": 2, "seed": 7}
    assert only(tmp_path / "result_0.txt", "run_stop")["metadata"] == {"status": "success", "epoch_num": 2}


def test_a_target_that_is_missed_is_an_aborted_run(tmp_path: Path) -> None:
    assert toy_fit(tmp_path / "result_0.txt", target=100.0).status == "aborted"
    assert only(tmp_path / "result_0.txt", "run_stop")["metadata"]["status"] == "aborted"
    assert keys(tmp_path / "result_0.txt").count("eval_accuracy") == 3


def test_a_late_score_belongs_to_the_epoch_that_was_scored(tmp_path: Path) -> None:
    module = Module("slow", {"seconds": 0.3})
    # The logger stands before the callback that waits for the last score, and still hears of it.
    toy_fit(tmp_path / "result_0.txt", AsyncCOCOScoring(), module=module, target=4.0, epochs=4)
    told = events(tmp_path / "result_0.txt")
    scores = [(e["value"], e["metadata"]["epoch_num"]) for e in told if e["key"] == "eval_accuracy"]
    assert scores == [(2.0, 1), (4.0, 2)], "later ones are not waited for by the clock"
    order = [(e["key"], e["metadata"].get("epoch_num")) for e in told]
    assert order.index(("epoch_start", 2)) < order.index(("eval_accuracy", 1)), "training went on meanwhile"
    assert order[-1] == ("run_stop", 2)


class ReadsAhead(Module):
    """Has its loaders made in `configure_optimizers`, long before training starts."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches in (2, -1)
        time.sleep(0.3)
        return super().configure_optimizers()


class NotesReads(Samples):
    def __init__(self, file: Path) -> None:
        super().__init__(4)
        self.file = file

    def __getitem__(self, index: int) -> Tensor:
        with self.file.open("a") as file:
            file.write(f"{time.time_ns() // 1_000_000}\n")
        return super().__getitem__(index)


class Streams(IterableDataset[Tensor]):
    """Has no length, so that Lightning fetches a batch ahead."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Tensor]:
        return iter([self.samples[index] for index in range(len(self.samples))])


@pytest.mark.parametrize(("workers", "streams"), [(0, False), (1, False), (0, True)])
def test_the_clock_runs_before_the_first_sample_is_read(tmp_path: Path, workers: int, streams: bool) -> None:
    samples: Any = NotesReads(tmp_path / "reads")
    train = DataLoader(Streams(samples) if streams else samples, batch_size=2, num_workers=workers)
    toy_fit(tmp_path / "result_0.txt", module=ReadsAhead(), train=train, epochs=1)
    first_read = int((tmp_path / "reads").read_text().split()[0])
    start = only(tmp_path / "result_0.txt", "run_start")["time_ms"]
    assert start <= first_read
    made = only(tmp_path / "result_0.txt", "init_start")["time_ms"]
    assert (start - made >= 300) == (not workers and not streams), "initialisation is on the clock of who reads ahead"


@pytest.mark.parametrize(("division", "minutes"), [("open", 240), ("closed", 30)])
def test_initialisation_beyond_its_limit_is_on_the_clock(tmp_path: Path, division: Any, minutes: int) -> None:
    started = time.time() - 60 * minutes - 5
    logger = MLPerfLogger(TOY, tmp_path / "r.txt", SubmissionConfig(division=division), started=started)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=[logger],
    )  # fmt: skip
    trainer.fit(Module(), loader(4), loader(2))
    begun, stop, start = (only(tmp_path / "r.txt", key)["time_ms"] for key in ("init_start", "init_stop", "run_start"))
    assert stop == start == begun + minutes * 60_000 - 1, "as late as the checker has it"


def test_progress_in_samples(tmp_path: Path) -> None:
    bert = Benchmark("bert", metric="mean", target=3.0, progress="samples")
    toy_fit(tmp_path / "result_0.txt", benchmark=bert, val_check_interval=1, accumulate_grad_batches=1)
    told = events(tmp_path / "result_0.txt")
    scores = [(e["value"], e["metadata"]["epoch_num"]) for e in told if e["key"] == "eval_accuracy"]
    assert scores == [(1.0, 2), (2.0, 4), (3.0, 6)], "epoch_num counts samples"
    assert only(tmp_path / "result_0.txt", "train_samples")["value"] == 6
    assert [e["key"] for e in told[-3:]] == ["block_stop", "train_samples", "run_stop"]


def test_an_evaluation_within_an_epoch_is_a_share_of_it(tmp_path: Path) -> None:
    toy_fit(tmp_path / "result_0.txt", val_check_interval=1)
    numbers = [e["metadata"]["epoch_num"] for e in events(tmp_path / "result_0.txt") if e["key"] == "eval_start"]
    assert numbers == [0.5, 1, 1.5, 2]


class Breaks(Module):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        raise self.error


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_a_run_that_breaks_off_is_aborted(tmp_path: Path, error: BaseException) -> None:
    module = Breaks()
    module.error = error  # type: ignore[assignment]
    with pytest.raises((type(error), SystemExit)):
        toy_fit(tmp_path / "result_0.txt", module=module)
    assert keys(tmp_path / "result_0.txt")[-2:] == ["epoch_start", "run_stop"]


def test_a_run_that_fails_before_its_clock_leaves_no_file(tmp_path: Path) -> None:
    class Bad(Module):
        def configure_optimizers(self) -> Any:
            raise ValueError("no optimizer")

    with pytest.raises(ValueError, match="no optimizer"):
        toy_fit(tmp_path / "result_0.txt", module=Bad())
    assert not (tmp_path / "result_0.txt").exists()


def test_a_resumed_fit_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "result_0.txt"
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False,
                               "enable_checkpointing": False}  # fmt: skip
    first = pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=[MLPerfLogger(TOY, file)], **options)
    first.fit(Module(), loader(4), loader(2))
    first.save_checkpoint(tmp_path / "a.ckpt")
    before = file.read_text()
    second = pl.Trainer(accelerator="cpu", max_epochs=2, callbacks=[MLPerfLogger(TOY, file)], **options)
    with pytest.warns(UserWarning, match="a resumed fit has no time to train"):
        second.fit(Module(), loader(4), loader(2), ckpt_path=tmp_path / "a.ckpt")
    assert file.read_text() == before
    assert keys(file)[-1] == "run_stop"


def test_of_two_processes_the_first_writes(tmp_path: Path) -> None:
    toy_fit(tmp_path / "result_0.txt", target=2.0, strategy="ddp_fork", devices=2, train=loader(8))
    file = tmp_path / "result_0.txt"
    assert keys(file).count("init_start") == keys(file).count("run_stop") == 1
    assert only(file, "global_batch_size")["value"] == 4
    assert only(file, "submission_platform")["value"].startswith("2x")
    assert only(file, "run_stop")["metadata"]["status"] == "success"


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    def fit(score: str, value: float, module: pl.LightningModule) -> None:
        target = StopAtTarget(TargetConfig(score, value))
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, callbacks=[target, MLPerfLogger(TOY, tmp_path / "r.txt", CLOSED)],
        )  # fmt: skip
        trainer.fit(module, loader(4), loader(2))

    with pytest.raises(ConfigError, match=r"ssd is scored by 'mean', but target.metric is 'top1'"):
        fit("top1", 5.0, Module())
    with pytest.raises(
        ConfigError, match=r"closed division's target of ssd is 4, but target.value is 3, which is easier"
    ):
        fit("mean", 3.0, Module())
    with pytest.raises(ConfigError, match=r"scored by 'map', which is not logged when the evaluation ends; .* mean\."):
        toy_fit(tmp_path / "r.txt", benchmark=Benchmark("ssd", metric="map", target=0.34))


def test_the_trainer_is_left_as_it_was(tmp_path: Path) -> None:
    target = StopAtTarget(TargetConfig("mean", 4.0))
    toy_fit(tmp_path / "result_0.txt", target)
    assert target.listeners == []


def test_a_logger_tells_a_second_fit_from_its_beginning(tmp_path: Path) -> None:
    logger, files = MLPerfLogger(TOY, tmp_path / "result_0.txt"), []
    for _ in range(2):
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, callbacks=[logger],
        )  # fmt: skip
        trainer.fit(Module(), loader(4), loader(2))
        files.append([(e["key"], e["metadata"]) for e in events(tmp_path / "result_0.txt")])
    assert files[0] == files[1]


def test_clearing_the_cache_of_files(tmp_path: Path) -> None:
    switch = tmp_path / "drop_caches"
    clear_page_cache(switch)
    assert switch.read_text() == "3\n"
    with pytest.raises(ConfigError, match=r"clear_cache: .* can't be written \(No such file.*run as root"):
        clear_page_cache(tmp_path / "none" / "drop_caches")


def test_nan_is_no_score_that_reaches_anything(tmp_path: Path) -> None:
    class Diverges(Module):
        def on_validation_epoch_end(self) -> None:
            self.log("mean", torch.tensor(float("nan")))

    assert toy_fit(tmp_path / "result_0.txt", module=Diverges(), epochs=1).status == "aborted"


def test_the_pages_python_block_runs() -> None:
    page = (Path(fasttrain.__file__).parent / "mlperf" / "README.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    found: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), found)
    assert [type(each) for each in found["callbacks"]] == [StopAtTarget, MLPerfLogger]
