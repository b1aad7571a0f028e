"""Where a run's time goes, how many samples it saw, and the throughput that it logs."""

import time
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fasttrain.clock import PARTS, RunClock
from fasttrain.plan import Plan
from fasttrain.recorder import RunRecorder, samples_in


class Slow(pl.LightningModule):
    """Sleeps a known time in the step and in the evaluation."""

    def __init__(self, step: float = 0.0, evaluation: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.step, self.evaluation = step, evaluation

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(self.step)
        return self.net(batch[0]).square().mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(self.evaluation)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SlowSet(TensorDataset):
    def __init__(self, size: int, seconds: float = 0.0) -> None:
        super().__init__(torch.ones(size, 2))
        self.seconds = seconds

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return super().__getitem__(index)


class Rows(Logger):
    name, version = "rows", ""

    def __init__(self) -> None:
        super().__init__()
        self.throughput: list[tuple[int | None, float]] = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if "samples_per_second" in metrics:
            self.throughput.append((step, metrics["samples_per_second"]))


def run(module: pl.LightningModule, data: Any, val: Any = None, **options: Any) -> tuple[RunRecorder, Rows, list[Any]]:
    clock, rows, plans = RunClock(), Rows(), []
    recorder = RunRecorder(Plan(), clock, time.perf_counter(), plans.append)
    extra = options.pop("callbacks", [])
    settings = {"max_epochs": 1, "log_every_n_steps": 1, **options}
    trainer = pl.Trainer(
        accelerator="cpu", callbacks=[recorder, *extra], logger=rows, profiler=clock, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0, **settings,
    )  # fmt: skip
    trainer.fit(module, data, val)
    return recorder, rows, plans


def test_each_part_gets_its_time(tmp_path: Any) -> None:
    class SlowSave(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "x.ckpt")

        def on_save_checkpoint(self, *_: Any) -> None:
            time.sleep(0.05)

    recorder, _, _ = run(
        Slow(step=0.02, evaluation=0.03),
        DataLoader(SlowSet(5, seconds=0.01), batch_size=1),
        DataLoader(SlowSet(2, seconds=0.01), batch_size=1),
        callbacks=[SlowSave()],
    )
    parts = recorder.breakdown()
    assert set(parts) == {*PARTS, "start_up", "other"}
    assert parts["data_wait"] >= 0.05
    assert parts["step"] >= 0.10
    assert parts["evaluation"] >= 0.08, "the evaluation's own data waits are evaluation"
    assert parts["checkpoint"] >= 0.05
    # No upper bounds on a busy machine; but what is counted twice would make the sum too large.
    assert sum(parts.values()) == pytest.approx(recorder.seconds, abs=0.2)


def test_the_clock_alone() -> None:
    clock = RunClock()
    clock.stop("run_training_batch")  # an end without a begin
    assert clock.seconds["step"] == 0
    clock.start("something else")
    clock.stop("something else")
    assert set(clock.seconds.values()) == {0}
    clock.begin_evaluation()
    clock.start("[Strategy]X.batch_to_device")
    clock.stop("[Strategy]X.batch_to_device")
    clock.start("save_checkpoint")
    clock.stop("save_checkpoint")
    time.sleep(0.002)
    clock.end_evaluation()
    assert clock.seconds["evaluation"] >= 0.002
    assert clock.seconds["host_to_device"] == clock.seconds["checkpoint"] == 0, "counted once, as evaluation"
    clock.start("[Strategy]X.batch_to_device")
    clock.stop("[Strategy]X.batch_to_device")
    assert clock.seconds["host_to_device"] > 0


def test_samples_are_counted_and_throughput_leaves_evaluation_out() -> None:
    recorder, rows, plans = run(
        Slow(step=0.01, evaluation=0.1),
        DataLoader(SlowSet(11), batch_size=2),
        DataLoader(SlowSet(2), batch_size=1),
        max_epochs=2,
        val_check_interval=2,
    )
    assert recorder.samples == 22, "the last batch of an epoch is a smaller one"
    assert [step for step, _ in rows.throughput] == list(range(1, 12)), "at the step under which Lightning logs"
    # At most 2 samples in 10 ms; with the evaluation's 200 ms counted in, it would be below 10.
    assert all(20 < value <= 200 for _, value in rows.throughput), rows.throughput
    assert recorder.throughput == rows.throughput[-1][1]
    assert plans == [{"optimizations": []}]


def test_one_log_entry_a_step_while_gradients_are_accumulated() -> None:
    _, rows, _ = run(Slow(), DataLoader(SlowSet(12), batch_size=1), accumulate_grad_batches=3, log_every_n_steps=2)
    steps = [step for step, _ in rows.throughput]
    assert steps == sorted(set(steps)) == [3]


def test_a_module_that_counts_by_itself() -> None:
    class Packed(Slow):
        def samples_in(self, batch: Any) -> int:
            return 7

    assert run(Packed(), DataLoader(SlowSet(4), batch_size=2))[0].samples == 14


def test_counts_go_on_after_a_resume() -> None:
    first, _, _ = run(Slow(), DataLoader(SlowSet(4), batch_size=2))
    state = first.state_dict()
    second = RunRecorder(Plan(), RunClock(), time.perf_counter(), lambda record: None)
    second.load_state_dict(state)
    assert second.samples == 4
    assert state["seconds"] <= second.seconds < state["seconds"] + 5
    parts = second.breakdown()
    assert parts["step"] == state["breakdown"]["step"]
    assert parts["start_up"] == state["breakdown"]["start_up"]
    assert sum(parts.values()) == pytest.approx(second.seconds, abs=0.2)


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.zeros(3, 2), 3),
        ([torch.zeros(4), torch.zeros(2)], 4),
        ({"name": "x", "images": torch.zeros(5, 1)}, 5),
        ({"meta": ["a"], "inner": (torch.zeros(2),)}, 2),
        (torch.tensor(1.0), 1),
        ("text", 1),
        ([], 1),
    ],
)
def test_samples_in(batch: Any, count: int) -> None:
    assert samples_in(batch) == count
