"""`AsyncCOCOScoring` in fits: late scores where they belong, training untouched, faults survived, nothing left."""

import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import score_functions
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from numpy.typing import NDArray
from test_async_scorer import children, held
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fasttrain.callbacks.async_scoring import (
    AsyncCOCOScoring,
    AsyncScoringConfig,
    AsyncScoringOptimization,
    KeepsRows,
    callback,
)
from fasttrain.callbacks.async_scoring.reference import reference
from fasttrain.callbacks.evaluation_cache import EvaluationCache
from fasttrain.callbacks.graph_evaluation import GraphedEvaluation
from fasttrain.config import TargetConfig
from fasttrain.environment import Hardware
from fasttrain.errors import ConfigError, OptimizationError
from fasttrain.optimization import Applies, Context, Refuses
from fasttrain.results import MetricsFile
from fasttrain.target import StopAtTarget
from fasttrain.trainer import stop_now

SCORES = Path(score_functions.__file__)
FIRST_STEPS = 3  # of an epoch


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before, shared = children(), sorted(os.listdir("/dev/shm"))
    yield
    assert children() <= before, "a process is left"
    assert held() == [], "memory is left"
    assert sorted(os.listdir("/dev/shm")) == shared, "a segment is left"


class Module(pl.LightningModule):
    """Has batch norm and dropout; what it finds in validation is its number of steps, and a sum of its weights."""

    def __init__(self, function: str = "mean", truth: dict[str, Any] | None = None, pause: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1))
        self.function, self.truth, self.pause = function, truth or {}, pause
        self.seen: list[Any] = []
        self.rows: list[NDArray[np.float64]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(self.pause)
        self.seen += batch[0][:, 0].tolist()
        loss: Tensor = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0] + torch.rand(1))
        self.rows.append(np.full((2, 3), float(self.global_step)))

    def on_validation_epoch_end(self) -> None:
        """The blocking way."""
        rows = self.validation_rows()
        if not self.trainer.sanity_checking:
            function = getattr(score_functions, self.function)
            scores = reference(function, self.ground_truth(), rows)
            self.log_dict({name: torch.tensor(value, dtype=torch.float64) for name, value in scores.items()})

    def validation_rows(self) -> Sequence[NDArray[Any]]:
        rows, self.rows = self.rows, []
        return rows

    def ground_truth(self) -> Any:
        return self.truth

    def score_function(self) -> Any:
        return f"{SCORES}:{self.function}"

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loaders(steps: int = FIRST_STEPS) -> dict[str, DataLoader[Any]]:
    data = TensorDataset(torch.arange(4.0 * steps).reshape(-1, 2))
    return {"train_dataloaders": DataLoader(data, batch_size=2, shuffle=True), "val_dataloaders": DataLoader(data, 2)}


def fit(
    module: Module, *callbacks: pl.Callback, folder: Path | None = None, resume: Path | None = None, **options: Any
) -> pl.Trainer:
    torch.manual_seed(3)
    trainer = pl.Trainer(
        accelerator="cpu", callbacks=list(callbacks), enable_model_summary=False,
        logger=MetricsFile(folder / "metrics.csv") if folder else False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        **{"max_epochs": 3, "log_every_n_steps": 1, "enable_progress_bar": False, **options},
    )  # fmt: skip
    trainer.fit(module, **loaders(), ckpt_path=str(resume) if resume else None)
    return trainer


def fresh(*arguments: Any, **options: Any) -> Module:
    torch.manual_seed(7)
    return Module(*arguments, **options)


def logged(folder: Path, *names: str) -> list[tuple[int, int, str, float]]:
    rows = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()[1:]]
    return sorted((int(r[0]), int(r[1]), r[3], float(r[4])) for r in rows if r[3] in names)


# ---- scores where they belong ----------------------------------------------------------------------------------------


def test_scores_are_those_of_the_blocking_way_under_the_same_steps(tmp_path: Path) -> None:
    for name in ("ours", "blocking"):
        (tmp_path / name).mkdir()
    scoring = AsyncCOCOScoring()
    trainer = fit(fresh(), scoring, folder=tmp_path / "ours")
    blocking = fit(fresh(), folder=tmp_path / "blocking")
    ours = logged(tmp_path / "ours", "mean", "count")
    assert ours == logged(tmp_path / "blocking", "mean", "count")
    assert [value for _, _, name, value in ours if name == "mean"] == [3, 6, 9]
    assert float(trainer.callback_metrics["mean"]) == float(blocking.callback_metrics["mean"]) == 9
    assert [(tag.step, tag.epoch) for tag, _ in scoring.scores] == [(3, 0), (6, 1), (9, 2)]
    evaluated = logged(tmp_path / "ours", "evaluated_seconds")
    arrived = logged(tmp_path / "ours", "score_arrived_seconds")
    assert all(late[3] > early[3] > 0 for early, late in zip(evaluated, arrived, strict=True))


def test_training_goes_on_while_it_is_scored(tmp_path: Path) -> None:
    scoring = AsyncCOCOScoring(most_in_flight=5)
    trainer = fit(fresh("slow", {"seconds": 0.2}), scoring, folder=tmp_path, max_epochs=4)
    assert trainer.global_step == 12
    assert [tag.step for tag, _ in scoring.scores] == [3, 6, 9, 12]
    table = scoring.table()
    assert table.columns[2:4] == ("evaluated (s)", "score arrived (s)")
    assert max(row[2] for row in table.rows) < min(row[3] for row in table.rows), "none arrived before the last began"
    assert scoring.stalled_seconds < 0.1
    assert "training stood still for 0.0" in table.note


def test_draining_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(callback, "rank_zero_info", told.append)
    fit(fresh("slow", {"seconds": 0.2}), AsyncCOCOScoring(), max_epochs=1)
    assert told[0] == "scoring: 0 of 1 evaluations done after 0 s"
    assert told[-2].startswith("scoring: 1 of 1 evaluations done after ")
    assert told[-1].startswith("step 3 (epoch 0): mean 3.0000, known 0.")

    class Bar(pl.callbacks.ProgressBar):
        def print(self, *words: Any, **options: Any) -> None:
            shown.extend(words)

    shown: list[str] = []
    fit(fresh(), AsyncCOCOScoring(), Bar(), max_epochs=1, enable_progress_bar=True)
    assert shown[-1].startswith("step 3 (epoch 0): mean 3.0000, known")


def test_several_evaluations_an_epoch_and_a_run_without_any(tmp_path: Path) -> None:
    scoring = AsyncCOCOScoring()
    fit(fresh(), scoring, folder=tmp_path, val_check_interval=1, max_epochs=2)
    assert [tag.step for tag, _ in scoring.scores] == [1, 2, 3, 4, 5, 6]
    never = AsyncCOCOScoring()
    fit(fresh(), never, limit_val_batches=0)
    assert (never.changes, never.scores, never.table().rows) == ([], [], [])


def test_validating_alone_scores_as_always() -> None:
    module, scoring = fresh(), AsyncCOCOScoring()
    trainer = fit(module, scoring, max_epochs=1)
    assert "on_validation_epoch_end" not in vars(module), "the module has its own way back"
    (found,) = trainer.validate(module, loaders()["val_dataloaders"], verbose=False)
    assert found["count"] == 2 * FIRST_STEPS
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, **loaders())
    assert [tag.step for tag, _ in scoring.scores] == [3, 6], "a second fit goes on"


# ---- training is not changed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [False, True], ids=["plain evaluations", "captured, on kept batches"])
def test_weights_are_equal_with_and_without_evaluation(quick: bool) -> None:
    found = []
    graphs, cache = GraphedEvaluation(stand_in=True), EvaluationCache(most_gb=1)
    evaluating = [AsyncCOCOScoring(), *([graphs, cache] if quick else [])]
    for callbacks, options in ((evaluating, {}), ([], {"limit_val_batches": 0})):
        module = fresh()
        fit(module, *callbacks, max_epochs=4, **options)
        found.append((module.state_dict(), module.seen, torch.get_rng_state()))
    if quick:
        assert graphs.table().rows[0][2] > 5, "replays"
        assert cache.table().rows[-1] == (2, "handed out from the device")
    (ours, seen, state), (without, seen_without, state_without) = found
    assert seen == seen_without, "the order of the data"
    assert torch.equal(state, state_without), "the random state"
    for name, value in without.items():
        assert torch.equal(ours[name], value), name
    module = fresh()
    fit(module, max_epochs=4)
    assert module.seen != seen, "plain Lightning's evaluation changes training: the test would notice"


# ---- the target ------------------------------------------------------------------------------------------------------


def test_a_late_score_stops_the_run_and_counts_from_its_step(tmp_path: Path) -> None:
    target = StopAtTarget(TargetConfig("mean", 6.0))
    begun = time.perf_counter()
    target.moment = lambda: {"seconds": time.perf_counter() - begun}
    module = fresh("slow", {"seconds": 0.3}, pause=0.02)
    trainer = fit(module, AsyncCOCOScoring(most_in_flight=9), target, folder=tmp_path, max_epochs=200)
    assert 6 < trainer.global_step < 600, "the steps that were taken meanwhile"
    assert trainer.global_step % FIRST_STEPS or trainer.global_step > 9
    reached = target.reached_at
    assert reached is not None
    assert (reached["step"], reached["epoch"]) == (6, 1)
    assert reached["score_arrived_seconds"] - reached["seconds"] > 0.3, "both wall times"
    assert target.scores[:2] == [(3, 3.0), (6, 6.0)]
    assert [step for step, _ in target.scores] == sorted(step for step, _ in target.scores)
    assert "on_validation_end" not in vars(target)


def test_a_target_that_is_reached_by_the_last_score() -> None:
    target = StopAtTarget(TargetConfig("mean", 9.0))
    fit(fresh(), AsyncCOCOScoring(), target)
    assert target.reached_at == {"step": 9, "epoch": 2}


def test_a_target_of_another_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"target\.metric is 'map', but the score function gives no such value; it"):
        fit(fresh(), AsyncCOCOScoring(), StopAtTarget(TargetConfig("map", 0.5)))


def test_early_stopping_is_refused() -> None:
    with pytest.raises(OptimizationError, match="EarlyStopping monitors 'mean', which is not logged before"):
        fit(fresh(), AsyncCOCOScoring(), EarlyStopping("mean"))


# ---- the best checkpoint ---------------------------------------------------------------------------------------------


class KeepsRandomState(pl.Callback):
    """What `AsyncCOCOScoring` does too, for a blocking run to compare with."""

    def on_train_batch_end(self, *rest: Any) -> None:
        self.state = torch.get_rng_state()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            torch.set_rng_state(self.state)


@pytest.mark.parametrize(("mode", "best", "each_epoch"), [("max", 9, False), ("min", 2, False), ("min", 3, True)])
def test_the_best_checkpoint_holds_the_weights_that_were_scored(
    mode: str, best: int, each_epoch: bool, tmp_path: Path
) -> None:
    options: dict[str, Any] = {} if each_epoch else {"val_check_interval": 2, "check_val_every_n_epoch": None}
    kept = []
    for folder, first in (("ours", AsyncCOCOScoring(most_in_flight=20)), ("blocking", KeepsRandomState())):
        checkpoint = ModelCheckpoint(tmp_path / folder, "{step}-{mean:.1f}", "mean", mode=mode, save_last=True)
        module = fresh("slow", {"seconds": 0.05 if folder == "ours" else 0.0}, pause=0.01)
        fit(module, first, checkpoint, max_steps=10, max_epochs=-1, **options)
        kept.append(checkpoint)
    ours, blocking = kept
    names = [sorted(path.name for path in (tmp_path / folder).iterdir()) for folder in ("ours", "blocking")]
    assert names[0] == names[1], "and no candidate is left"
    assert Path(ours.best_model_path).name == Path(blocking.best_model_path).name
    assert ours.best_model_score is not None
    assert float(ours.best_model_score) == best + (mode == "max" and not each_epoch)
    state, expected = (torch.load(c.best_model_path) for c in (ours, blocking))
    assert state["global_step"] == expected["global_step"]
    for name, value in expected["state_dict"].items():
        assert torch.equal(state["state_dict"][name], value), name


def test_the_best_of_several_and_one_fixed_name(tmp_path: Path) -> None:
    kept = ModelCheckpoint(tmp_path / "three", "{step}", "mean", mode="min", save_top_k=3)
    best = ModelCheckpoint(tmp_path, "best", "mean", mode="max", save_on_train_epoch_end=False,
                           enable_version_counter=False)  # fmt: skip
    fit(fresh(), AsyncCOCOScoring(), kept, best, max_epochs=5)
    assert sorted(path.name for path in (tmp_path / "three").iterdir()) == ["step=3.ckpt", "step=6.ckpt", "step=9.ckpt"]
    assert torch.load(tmp_path / "best.ckpt")["global_step"] == 15
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.ckpt", "three"]


def test_a_monitor_of_another_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ModelCheckpoint monitors 'map', but the score function gives no such value"):
        fit(fresh(), AsyncCOCOScoring(), ModelCheckpoint(tmp_path, monitor="map"))
    assert list(tmp_path.iterdir()) == []


# ---- stopping and going on -------------------------------------------------------------------------------------------


class StopsAt(pl.Callback):
    """Saves at a step, and ends the run there."""

    def __init__(self, step: int, path: Path, error: BaseException) -> None:
        self.step, self.path, self.error = step, path, error

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            raise self.error


def test_rows_that_were_not_scored_are_scored_by_the_resumed_run(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    first = StopAtTarget(TargetConfig("mean", 100.0))
    first.moment = lambda: {"seconds": 1.5}
    with pytest.raises(ZeroDivisionError):
        fit(fresh("slow", {"seconds": 60.0}), AsyncCOCOScoring(most_in_flight=9), first,
            StopsAt(7, path, ZeroDivisionError()))  # fmt: skip
    assert first.scores == []
    second, scoring = StopAtTarget(TargetConfig("mean", 6.0, stop=False)), AsyncCOCOScoring(most_in_flight=9)
    fit(fresh(), scoring, second, resume=path, folder=tmp_path)
    assert second.scores == [(3, 3.0), (6, 6.0), (9, 9.0)]
    assert second.reached_at == {"step": 6, "epoch": 1, "seconds": 1.5}, "the moment of its evaluation"
    assert logged(tmp_path, "mean")[:2] == [(2, 0, "mean", 3.0), (5, 1, "mean", 6.0)]
    assert [row[0] for row in scoring.table().rows] == [3, 6, 9]
    fit(fresh(), resume=path)  # plain Lightning goes on from it too


@pytest.mark.parametrize("name", ["best", "{step}"])
def test_the_best_checkpoint_of_a_run_that_was_stopped_stays_the_best(name: str, tmp_path: Path) -> None:
    def keeper() -> ModelCheckpoint:
        counts = name != "best"
        return ModelCheckpoint(tmp_path / "kept", name, "mean", mode="min", enable_version_counter=counts)

    class Stops(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
            if trainer.global_step == 5:
                trainer.save_checkpoint(tmp_path / "last.ckpt")
                stop_now(trainer)

    fit(fresh("slow", {"seconds": 0.3}), AsyncCOCOScoring(), Stops(), keeper())
    (before,) = (tmp_path / "kept").iterdir()
    assert torch.load(before)["global_step"] == 3
    second = keeper()
    fit(fresh(), AsyncCOCOScoring(), second, resume=tmp_path / "last.ckpt")
    assert float(second.best_model_score) == 3  # type: ignore[arg-type]
    (path,) = (tmp_path / "kept").iterdir()
    assert str(path) == second.best_model_path
    assert torch.load(path)["global_step"] == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError()])
def test_an_exception_leaves_nothing_behind(error: BaseException, tmp_path: Path) -> None:
    module = fresh("slow", {"seconds": 60.0})
    keeper = ModelCheckpoint(tmp_path, monitor="mean")
    begun = time.monotonic()
    with pytest.raises((SystemExit, ZeroDivisionError, KeyboardInterrupt)):
        fit(module, AsyncCOCOScoring(), keeper, StopsAt(5, tmp_path / "last.ckpt", error))
    assert time.monotonic() - begun < 30
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"], "no candidate either"
    assert "on_validation_epoch_end" not in vars(module)


# ---- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["killed", "raises", "none"])
def test_a_fault_is_survived(fault: str, tmp_path: Path) -> None:
    truth = {"fault": fault, "times": 1, "folder": str(tmp_path)}
    scoring = AsyncCOCOScoring()
    with pytest.warns(UserWarning, match=r"scoring step 3 \(epoch 0\): the scoring process .* trying once more"):
        fit(fresh("faulty", truth), scoring)
    assert [scores["mean"] for _, scores in scoring.scores] == [3, 6, 9]
    assert [row[-1] for row in scoring.table().rows] == [1, 0, 0]


def test_a_score_that_never_comes_fails_the_run_at_its_end(tmp_path: Path) -> None:
    truth = {"fault": "raises", "times": 2, "folder": str(tmp_path / "calls")}
    (tmp_path / "calls").mkdir()
    target, module = StopAtTarget(TargetConfig("mean", 100.0)), fresh("faulty", truth)
    keeper = ModelCheckpoint(tmp_path / "best", "{step}", "mean", mode="min")
    scoring = AsyncCOCOScoring(most_in_flight=9)
    with (
        pytest.warns(UserWarning, match="it stays without a score"),
        pytest.raises(
            OptimizationError, match=r"step 3 \(epoch 0\) could not be scored: the scoring process raised Key"
        ),
    ):
        fit(module, scoring, target, keeper)
    assert module.global_step == 9, "at the end, not before"
    assert target.scores == [(6, 6.0), (9, 9.0)], "no score is made up"
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["step=6.ckpt"]


def test_a_score_that_never_comes_may_be_left_out(tmp_path: Path) -> None:
    truth = {"fault": "raises", "times": 2, "folder": str(tmp_path)}
    scoring = AsyncCOCOScoring(on_failure="continue")
    with pytest.warns(UserWarning, match="it stays without a score"):
        fit(fresh("faulty", truth), scoring)
    assert [tag.step for tag, _ in scoring.scores] == [6, 9]
    table = scoring.table()
    assert math.isnan(float(table.rows[0][3]))
    assert table.note.endswith("1 of 3 evaluations could not be scored")


# ---- the door --------------------------------------------------------------------------------------------------------


def test_the_check() -> None:
    cpu = Hardware("cpu", "cpu", "a CPU", 2)
    optimization = AsyncScoringOptimization(AsyncScoringConfig())
    assert isinstance(optimization.check(Context(Module(), pl.LightningDataModule(), cpu)), Applies)
    verdict = optimization.check(Context(pl.LightningModule(), pl.LightningDataModule(), cpu))
    assert verdict == Refuses(
        "LightningModule has no validation_rows and no ground_truth and no score_function; a module that is scored "
        "elsewhere hands out the rows that an evaluation found, what they are scored against, and how"
    )
    assert isinstance(Module(), KeepsRows)
    attached = optimization.attach(Context(Module(), pl.LightningDataModule(), cpu)).callbacks
    fit(fresh(), *attached, max_epochs=1)
    assert [change.path for change in optimization.applied()] == ["on_validation_epoch_end"]
    assert [len(table.rows) for table in optimization.outcome()] == [1]


def test_a_module_without_rows_is_refused() -> None:
    class Plain(pl.LightningModule):
        training_step, configure_optimizers = Module.training_step, Module.configure_optimizers

    with pytest.raises(OptimizationError, match="async_scoring: Plain has no validation_rows and no ground_truth and"):
        fit(Plain(), AsyncCOCOScoring())  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"most_in_flight": 0}, {"niceness": -1}, {"timeout_seconds": 0.0}, {"threads": 0}])
def test_a_wrong_parameter_is_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"optimizations.async_scoring.{name} is .*; it must be "):
        AsyncScoringConfig(**wrong)
