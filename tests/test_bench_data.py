"""`fasttrain bench data`: waits that were put there on purpose are found, others are not, and a sentence says which."""

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fasttrain.bench_data import DataBench, Rates, bench_data
from fasttrain.callbacks import CATALOGUE
from fasttrain.cli import main
from fasttrain.errors import ConfigError, DataError
from fasttrain.measure import read_rows
from fasttrain.recipe import find_recipe, resolve
from fasttrain.step_clock import StepClock, StepTime

RECIPE = """
recipe: slow
module: {{class: test_bench_data.SlowStep, seconds: {step}}}
data: {{class: test_bench_data.SlowData, seconds: {loader}, size: {size}}}
trainer: {{max_epochs: 2, accelerator: cpu}}
"""


class SlowStep(pl.LightningModule):
    """A step of known length."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(self.seconds)
        return self.layer(batch).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class SlowSet(Dataset[Tensor]):
    def __init__(self, seconds: float, size: int) -> None:
        self.seconds, self.size = seconds, size

    def __getitem__(self, index: int) -> Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        return torch.ones(1)

    def __len__(self) -> int:
        return self.size


class SlowData(pl.LightningDataModule):
    def __init__(self, seconds: float, size: int) -> None:
        super().__init__()
        self.seconds, self.size = seconds, size

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(SlowSet(self.seconds / 2, self.size), batch_size=2)


def measure(tmp_path: Path, loader: float, step: float, size: int = 20) -> DataBench:
    file = tmp_path / "slow.yaml"
    file.write_text(RECIPE.format(loader=loader, step=step, size=size))
    return bench_data(resolve(file), CATALOGUE, steps=20)[0]


def test_a_loader_that_is_slow_is_waited_for(tmp_path: Path) -> None:
    found = measure(tmp_path, loader=0.06, step=0.0)
    assert found.data_wait > 0.5
    assert all(step.data_wait >= 0.06 for step in found.steps)
    # Not more than 2 samples in 60 ms; a busy machine makes less of them.
    assert found.loader.whole <= 2 / 0.06
    assert found.run.whole <= 2 / 0.06
    assert found.step.whole > found.loader.whole
    sentence = found.verdict("this")
    assert sentence.startswith("The loader is the bottleneck: alone it gives ")
    assert sentence.endswith("more loader processes, a cache, smaller images or a GPU loader would help.")


def test_a_step_that_is_slow_waits_for_nothing(tmp_path: Path) -> None:
    found = measure(tmp_path, loader=0.0, step=0.03, size=200)
    assert found.step.whole <= 2 / 0.03
    assert found.run.whole <= 2 / 0.03
    # Medians: others may have taken the cores in one of the steps.
    assert median(step.data_wait for step in found.steps) < 0.1 * median(step.whole for step in found.steps)
    assert median(found.loader.parts) > 3 * found.step.whole
    assert len(found.steps) == 20


def test_epochs_may_be_shorter_than_what_is_measured(tmp_path: Path) -> None:
    found = measure(tmp_path, loader=0.001, step=0.0, size=6)
    assert len(found.steps) == 20
    assert len(found.loader.parts) == 10


def test_wrong_numbers_and_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^the training loader of SlowData gave no batch to measure with\.$"):
        measure(tmp_path, 0.0, 0.0, size=0)
    with pytest.raises(ConfigError, match=r"^--steps is 3; a median with its spread takes at least 10\.$"):
        bench_data(resolve(tmp_path / "slow.yaml"), CATALOGUE, steps=3)


def bench(loader: float, step: float, run: float, wait: float = 0.0, copies: float = 0.0) -> DataBench:
    steps = [StepTime(1.0, wait, copies)] * 20
    return DataBench(Rates(loader, [loader]), Rates(step, [step]), Rates(run, [run]), steps)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            bench(100, 400, 95, wait=0.75),
            "The loader is the bottleneck: alone it gives 100 samples/s and the step takes 400, so 75.0% of the run is "
            "waiting for data; more loader processes, a cache, smaller images or a GPU loader would help.",
        ),
        (
            bench(500, 400, 350, wait=0.1),
            "The run waits for data 10.0% of its time although the loader alone (500 samples/s) is faster than the "
            "step (400): it delivers unevenly, or has fewer cores beside the step; more prefetching or other numbers "
            "of loader processes and threads would help.",
        ),
        (
            bench(5000, 400, 350, wait=0.01, copies=0.12),
            "Copies to the device are 12.0% of the run's time, waiting for data 1.0%; this would hide them behind the "
            "step.",
        ),
        (
            bench(5000, 400, 300),
            "The run (300 samples/s) is slower than its step (400) without waiting for data (0.0%): copies into a "
            "captured step, hooks, logging or cores that the loader takes from the step.",
        ),
        (
            bench(5000, 400, 398, wait=0.004),
            "The step is the bottleneck: 0.4% of the run is waiting for data, and the loader alone gives 5,000 "
            "samples/s where the step takes 400; only a faster step would help.",
        ),
    ],
)
def test_the_verdict(found: DataBench, sentence: str) -> None:
    assert found.verdict("this") == sentence


def test_rows_are_of_parts_of_several_steps() -> None:
    rates = Rates.of([4] * 20, [0.1, 0.3] * 10)
    assert rates.whole == pytest.approx(20)
    assert rates.parts == pytest.approx([20] * 10), "a burst and its pause are in one part"
    rows = list(bench(100, 400, 95, wait=0.75, copies=0.05).rows("mine", "plain", "none"))
    assert [(row.case, row.metric, row.value, row.unit) for row in rows] == [
        ("data_loader_alone", "samples_per_second", 100, "samples/s"),
        ("data_step_alone", "samples_per_second", 400, "samples/s"),
        ("data_run", "samples_per_second", 95, "samples/s"),
        ("data_run", "data_wait_percent", 75, "%"),
        ("data_run", "host_to_device_percent", 5, "%"),
    ]
    assert {row.subject for row in rows} == {"mine"}


def test_the_clock_of_single_steps() -> None:
    clock = StepClock("cpu")
    clock.stop("[Loop].train_dataloader_next")  # an end without a begin
    for wait in (0.002, 0.004, 0.0):
        clock.start("[Loop].train_dataloader_next")
        time.sleep(wait)
        clock.stop("[Loop].train_dataloader_next")
        clock.start("[Strategy]X.batch_to_device")
        time.sleep(0.003)
        clock.stop("[Strategy]X.batch_to_device")
    first, second = clock.steps(0, 3)
    assert clock.begun == 3
    assert first.data_wait >= 0.002
    assert second.data_wait >= 0.004
    assert second.host_to_device >= 0.003
    assert second.whole >= second.data_wait + second.host_to_device
    assert clock.seconds["data_wait"] >= 0.006, "it is a RunClock too"


def test_waiting_for_the_device_is_the_steps_time() -> None:
    clock = StepClock("cpu")
    clock.start("[Somebody].wait_for_step")
    time.sleep(0.002)
    clock.stop("[Somebody].wait_for_step")
    assert clock.seconds["step"] >= 0.002
    assert clock.begun == 0


@pytest.fixture
def said(
    capsys: pytest.CaptureFixture[str], foreign_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("COLUMNS", "200")
    shutil.copy(foreign_project / "shapes.yaml", tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            main(list(arguments))
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


TINY: Sequence[str] = (
    "data.image_size=[32,32]", "data.batch_size=2", "data.generated.train_images=12", "data.generated.val_images=2",
    "module.model.fpn_channels=8", "module.model.head_depth=1", "optimizations=none", "preset=small", "hardware=cpu",
    "module.model.head_norm=none",
)  # fmt: skip


def test_the_command_on_the_retinanet(said: Any, tmp_path: Path) -> None:
    code, out, err = said("bench", "data", "retinanet", *TINY, "--steps", "10", "--out", "rows.csv")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[:3] for line in lines[:5]] == [
        ["retinanet/data_loader_alone", "plain", "samples_per_second"],
        ["retinanet/data_step_alone", "plain", "samples_per_second"],
        ["retinanet/data_run", "plain", "samples_per_second"],
        ["retinanet/data_run", "plain", "data_wait_percent"],
        ["retinanet/data_run", "plain", "host_to_device_percent"],
    ]
    assert lines[5].startswith(("The step is", "The run", "The loader is", "Copies"))
    rows = read_rows(tmp_path / "rows.csv")
    assert len(rows) == 5
    assert all(row.repeats == 10 and row.value >= 0 and "preset small" in row.note for row in rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.csv", "shapes.yaml"], "no run folder is left"


def test_the_group_still_takes_names_of_cases(said: Any) -> None:
    for arguments in (("bench", "--list"), ("bench", "cases", "--list"), ("bench", "device_prefetch", "--list")):
        code, out, _ = said(*arguments)
        assert code == 0
        assert "device_prefetch/bookkeeping_cpu" in out
    code, out, _ = said("bench", "data", "--help")
    assert code == 0
    assert "what would help" in out
    assert said("bench", "data", "retinanett")[2] == (
        "error: there is no recipe 'retinanett'; did you mean 'retinanet'?\n"
    )
    assert find_recipe("retinanet").is_file()
