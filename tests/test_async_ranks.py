"""Scoring with several ranks: each image once, one process scores, and all take a score at the same step."""

import json
import multiprocessing
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import score_functions
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from numpy.typing import NDArray
from test_async_scorer import children, held
from test_async_scoring import logged
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fasttrain.callbacks.async_scoring import AsyncCOCOScoring, AsyncScorer, Scored, Tag
from fasttrain.callbacks.async_scoring.each_image_once import check_padding, leave_out_padding
from fasttrain.callbacks.async_scoring.ranks import OneProcess, SeveralProcesses
from fasttrain.config import TargetConfig
from fasttrain.errors import OptimizationError
from fasttrain.results import MetricsFile
from fasttrain.target import StopAtTarget
from fasttrain.trainer import stop_now

SCORES = Path(score_functions.__file__)
VAL, STEPS = 5, 4  # images, of which a sampler that pads makes six; steps an epoch

pytestmark = pytest.mark.skipif(torch.cuda.is_initialized(), reason="a process that uses CUDA can't be forked")


# ---- the groups, without a Trainer -----------------------------------------------------------------------------------


def on_two_ranks(body: Callable[[int, Path], Any], folder: Path) -> list[Any]:
    """Run a function in two processes joined by gloo; return what each returned."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_joined, args=(rank, body, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def _joined(rank: int, body: Callable[[int, Path], Any], folder: Path) -> None:
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=30))
    (folder / f"{rank}.json").write_text(json.dumps(body(rank, folder)))
    dist.destroy_process_group()


def gathers(rank: int, folder: Path) -> list[Any]:
    ranks, told = SeveralProcesses(), []
    fields = np.zeros(3 - rank, dtype=[("detection", "<f8", (7,)), ("mask", "<f2", (2, 2))])
    fields["detection"], fields["mask"] = rank, rank + 0.5
    for parts in (
        [np.full((2, 3), float(rank)), np.zeros((0, 3)), np.full((rank, 3), 5.0)],
        [np.ones((4, 2), np.float32)] if rank else [],
        [fields],
        [],
        [np.zeros((0, 2))],
    ):
        rows = ranks.gather(parts)
        if rank == 0:
            found = rows.result()
            plain = [[part[name].tolist() for name in part.dtype.names or ()] or part.tolist() for part in found]
            told.append([str(found[0].dtype) if found else "", plain])
            assert rows.done()
    with pytest.raises(ValueError, match="differ in their first dimension alone"):
        ranks.gather([np.zeros((1, 2 + rank))])
    ranks.close()
    return told


def test_rows_are_gathered_on_the_first_rank(tmp_path: Path) -> None:
    first, second = on_two_ranks(gathers, tmp_path)
    assert second == []
    numbers, one_sided, fields, nothing, no_rows = first
    assert numbers == ["float64", [[[0.0] * 3] * 2, [[1.0] * 3] * 2 + [[5.0] * 3]]]
    assert one_sided == ["float32", [[], [[1.0, 1.0]] * 4]]
    assert "mask" in fields[0]
    assert fields[1] == [
        [[[float(rank)] * 7] * (3 - rank), [[[rank + 0.5] * 2] * 2] * (3 - rank)] for rank in range(2)
    ]  # fmt: skip
    assert nothing == ["", []]
    assert no_rows == ["float64", [[], []]]


def announces(rank: int, folder: Path) -> list[Any]:
    ranks = SeveralProcesses()
    arrived = [0, 1, 3, 2, 0] if rank == 0 else [0] * 5  # of which those that are known now are taken away after
    known = [ranks.announced(count) for count in arrived]
    said = ranks.first(lambda: [rank, "word"])
    wrong = []
    for error in (OptimizationError("no room"), _NotPicklable(rank)):
        try:
            ranks.first(lambda error=error: _raise(error))  # type: ignore[misc]
        except Exception as raised:
            wrong.append(f"{type(raised).__name__}: {raised}")
    ranks.close()
    return [known, said, wrong]


class _NotPicklable(Exception):
    def __init__(self, rank: int) -> None:
        super().__init__(lambda: rank)


def _raise(error: Exception) -> None:
    raise error


def test_what_has_arrived_is_known_to_all_at_the_next_look(tmp_path: Path) -> None:
    first, second = on_two_ranks(announces, tmp_path)
    assert first[:2] == second[:2] == [[0, 0, 1, 2, 0], [0, "word"]]
    assert first[2][0] == second[2][0] == "OptimizationError: no room"
    assert "RuntimeError: _NotPicklable" in second[2][1]
    alone = OneProcess()
    assert (alone.announced(3), alone.first(lambda: 7), alone.gather([])) == (3, 7, [])


def test_rows_that_are_still_coming_hold_nobody_up() -> None:
    class Coming:
        there = False

        def done(self) -> bool:
            return self.there

        def result(self) -> list[NDArray[np.float64]]:
            while not self.there:
                time.sleep(0.01)
            return [np.ones((2, 3)), np.zeros((2, 3))]

    rows = Coming()
    with AsyncScorer(f"{SCORES}:mean", {}, tell=pytest.fail) as scoring:
        begun = time.perf_counter()
        scoring.submit(rows, Tag(1, 0))
        assert time.perf_counter() - begun < 0.1
        assert (scoring.poll(), scoring.arrived, scoring.in_flight) == ([], 0, 1)
        rows.there = True
        (outcome,) = scoring.drain()
        assert isinstance(outcome, Scored)
        assert outcome.scores == {"mean": 0.5, "count": 4}
        never = Coming()
        scoring.submit(never, Tag(2, 0))
        begun = time.perf_counter()
    assert time.perf_counter() - begun < 2, "closing doesn't wait for them"


# ---- fits ------------------------------------------------------------------------------------------------------------


class Module(pl.LightningModule):
    """Has dropout; finds one row an image in validation: the image, the step, the rank."""

    def __init__(self, function: str, truth: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1))
        self.function, self.truth = function, truth
        self.rows: list[NDArray[np.float64]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(0.02)
        loss: Tensor = self.net(batch[0] / 10).square().mean()
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.net(batch[0] + torch.rand(1))
        self.rows += [np.array([[image, self.global_step, self.global_rank]]) for image in batch[0][:, 0].tolist()]

    def validation_rows(self) -> list[NDArray[np.float64]]:
        rows, self.rows = self.rows, []
        return rows

    def ground_truth(self) -> Any:
        return self.truth

    def score_function(self) -> Any:
        return f"{SCORES}:{self.function}"

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Tells(pl.Callback):
    """Writes down what each rank has at the end, and keeps the scoring process's number while there is one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes = 0

    def on_train_batch_start(self, *rest: Any) -> None:
        self.processes = max(self.processes, len(children()))

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        targets = [c for c in callbacks if isinstance(c, StopAtTarget)]
        told = {
            "step": trainer.global_step,
            "weights": [value.tolist() for value in pl_module.parameters()],
            "statistics": [value.tolist() for value in pl_module.buffers()],
            "random": torch.get_rng_state()[:40].tolist(),
            "scores": [[tag.step, s] for c in callbacks if isinstance(c, AsyncCOCOScoring) for tag, s in c.scores],
            "targets": [[c.scores, c.reached_at] for c in targets],
            "best": [
                [c.best_model_path, None if c.best_model_score is None else float(c.best_model_score)]
                for c in callbacks if isinstance(c, ModelCheckpoint)
            ],
            "late": {str(name): float(value) for name, value in trainer.callback_metrics.items()},
            "processes": self.processes,
            "left": [len(children()), len(held())],
        }  # fmt: skip
        (self.folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(told))


def fit(
    folder: Path,
    *callbacks: pl.Callback,
    function: str = "images",
    truth: dict[str, Any] | None = None,
    resume: Path | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Train on two ranks with Lightning's own samplers; return what each rank told."""
    folder.mkdir(exist_ok=True)
    train, val = (TensorDataset(torch.arange(float(size))[:, None]) for size in (4 * STEPS, VAL))
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, logger=MetricsFile(folder / "metrics.csv"), callbacks=[*callbacks, Tells(folder)],
        strategy=DDPStrategy(start_method="fork", process_group_backend="gloo", timeout=timedelta(seconds=60)),
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1, num_sanity_val_steps=0,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks), **{"max_epochs": 3, **options},
    )  # fmt: skip
    module = Module(function, truth or {})
    trainer.fit(module, DataLoader(train, 2, shuffle=True), DataLoader(val, 1), ckpt_path=str(resume or "") or None)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_two_ranks_score_each_image_once_and_train_as_without(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path / "best", "{step}", "step", mode="max")
    ranks = fit(tmp_path / "with", AsyncCOCOScoring(poll_every_n_batches=1), best)
    without = fit(tmp_path / "without", limit_val_batches=0)
    steps = [STEPS * epoch for epoch in (1, 2, 3)]
    for rank, other in zip(ranks, without, strict=True):
        assert rank["scores"] == [[step, {"step": step, "rows": VAL, "images": VAL}] for step in steps]
        assert rank["late"]["rows"] == VAL
        assert (rank["weights"], rank["random"]) == (other["weights"], other["random"]), "evaluating changes nothing"
        assert rank["left"] == [0, 0]
        ((path, score),) = rank["best"]
        assert (path, score) == (str(tmp_path / "best" / f"step={STEPS * 3}.ckpt"), STEPS * 3)
    # The other rank's are its own until DDP copies the first's over them, before the next step or evaluation.
    assert ranks[0]["statistics"] == without[0]["statistics"]
    assert [rank["processes"] for rank in ranks] == [1, 0], "one process scores"
    assert [path.name for path in (tmp_path / "best").iterdir()] == [f"step={STEPS * 3}.ckpt"]
    assert [(row[0], row[3]) for row in logged(tmp_path / "with", "rows")] == [(step - 1, VAL) for step in steps]


def test_all_ranks_stop_at_the_same_step_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    target = StopAtTarget(TargetConfig("step", 2 * STEPS))
    scoring = AsyncCOCOScoring(poll_every_n_batches=3, most_in_flight=9)
    ranks = fit(tmp_path, scoring, target, truth={"seconds": 0.1}, max_epochs=50)
    first, second = ranks
    assert first["step"] == second["step"]
    assert 2 * STEPS < first["step"] < 40 * STEPS
    assert first["weights"] == second["weights"]
    assert first["targets"] == second["targets"]
    ((scores, reached),) = first["targets"]
    assert scores[:2] == [[STEPS, STEPS], [2 * STEPS, 2 * STEPS]]
    assert reached == {"step": 2 * STEPS, "epoch": 1}


def test_all_ranks_wait_for_room_together(tmp_path: Path) -> None:
    first, second = fit(tmp_path, AsyncCOCOScoring(most_in_flight=1), truth={"seconds": 0.4})
    assert first["scores"] == second["scores"]
    assert [step for step, _ in first["scores"]] == [STEPS, 2 * STEPS, 3 * STEPS]


class Stops(pl.Callback):
    """Saves while an evaluation is being scored, and ends the run without waiting for it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        if trainer.global_step == STEPS + 1:
            trainer.save_checkpoint(self.path)
            stop_now(trainer)


def test_a_resumed_run_scores_what_was_not_scored(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    fit(tmp_path / "first", AsyncCOCOScoring(), Stops(path), truth={"seconds": 0.5})
    ranks = fit(tmp_path / "second", AsyncCOCOScoring(), StopAtTarget(TargetConfig("step", 99)), resume=path)
    for rank in ranks:
        assert [step for step, _ in rank["scores"]] == [STEPS, 2 * STEPS, 3 * STEPS]
        assert [step for step, _ in rank["targets"][0][0]] == [STEPS, 2 * STEPS, 3 * STEPS]
        assert rank["scores"][0][1]["images"] == VAL


def test_a_fault_on_the_first_rank_ends_all(tmp_path: Path) -> None:
    begun, calls = time.monotonic(), tmp_path / "calls"
    calls.mkdir()
    with pytest.raises(Exception, match="could not be scored: the scoring process raised KeyError"):
        fit(tmp_path, AsyncCOCOScoring(), function="faulty", max_epochs=1,
            truth={"fault": "raises", "times": 99, "folder": str(calls)})  # fmt: skip
    with pytest.raises(Exception, match="give its module or file and its name"):
        fit(tmp_path, AsyncCOCOScoring(), function=":", max_epochs=1)
    assert time.monotonic() - begun < 40, "and leaves none waiting"
    assert not children()


# ---- samplers that pad -----------------------------------------------------------------------------------------------


def test_padding_is_left_out() -> None:
    data = TensorDataset(torch.arange(7.0))
    samplers = [DistributedSampler(data, 3, rank, shuffle=False) for rank in range(3)]
    loaders = [DataLoader(data, sampler=sampler) for sampler in samplers]
    with pytest.raises(OptimizationError, match="2 of 7 validation samples would be scored twice, because Distributed"):
        check_padding({"a": loaders[0]})
    assert leave_out_padding([loaders, {"b": DataLoader(data)}]) == 6
    assert leave_out_padding(loaders) == 0
    check_padding(loaders)
    shares = [list(sampler) for sampler in samplers]
    assert shares == [[0, 3, 6], [1, 4], [2, 5]]
    assert [len(loader) for loader in loaders] == [3, 2, 2]
    dropping = DistributedSampler(data, 3, 0, shuffle=False, drop_last=True)
    assert leave_out_padding(DataLoader(data, sampler=dropping)) == 0, "it was asked to leave some out"
