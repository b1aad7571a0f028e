"""A user's own Lightning project, unchanged: through `fasttrain fit`, and with one optimization in a plain Trainer."""

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rich.console import Console

from fasttrain.callbacks import CATALOGUE, ChannelsLast
from fasttrain.errors import ConfigError, FasttrainError, OptimizationError
from fasttrain.fit import Outcome, fit
from fasttrain.recipe import resolve
from fasttrain.validate import validate

NEVER = ["target.value=2", "loggers=[]"]
"""Train to the end."""


def run(recipe: Path, run_dir: Path, *overrides: str, resume: Path | None = None) -> Outcome:
    console = Console(file=open(os.devnull, "w"))  # noqa: SIM115
    return fit(
        resolve(recipe, overrides), CATALOGUE, run_dir=None if resume else run_dir, resume=resume, console=console
    )


def logged(folder: Path) -> list[tuple[str, ...]]:
    """The rows of metrics.csv but for the wall seconds, and without the throughput."""
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [(r["step"], r["epoch"], r["name"], r["value"]) for r in rows if r["name"] != "samples_per_second"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(folder / "checkpoints" / "last.ckpt")["state_dict"]
    return state


def plain_trainer(**options: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        **{"enable_checkpointing": False, **options},
    )  # fmt: skip


@pytest.fixture
def recipe(foreign_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project's recipe; its runs draw no plots, which take longer than its training."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fasttrain.session.write_plots", lambda folder: [])
    return foreign_project / "shapes.yaml"


def test_it_reaches_its_target_and_leaves_a_whole_run_folder(foreign_project: Path, tmp_path: Path) -> None:
    outcome = run(foreign_project / "shapes.yaml", tmp_path / "run", "loggers=[csv]")
    assert {path.name for path in (outcome.folder / "plots").iterdir()} >= {"loss.png", "score.png"}
    result = json.loads((outcome.folder / "result.json").read_text())
    assert result["status"] == "reached_target"
    assert result["reached"] is True
    assert result["quality"]["name"] == "val_acc"
    assert result["quality"]["value"] >= 0.9
    assert result["reached_at"]["samples"] == result["samples"] > 0
    assert set(result["breakdown_seconds"]) >= {"data_wait", "host_to_device", "step", "evaluation", "checkpoint"}
    for name in ("config.yaml", "environment.json", "metrics.csv", "checkpoints/last.ckpt", "checkpoints/best.ckpt"):
        assert (outcome.folder / name).is_file(), name
    (row,) = json.loads((outcome.folder / "plan.json").read_text())["optimizations"]
    assert (row["name"], row["verdict"]) == ("channels_last", "applies")
    assert [change["path"] for change in row["changes"]] == ["net.0.weight", "net.3.weight"]
    names = {name for _, _, name, _ in logged(outcome.folder)}
    assert {"train_loss", "val_acc"} <= names


def test_in_a_process_of_its_own(foreign_project: Path, tmp_path: Path) -> None:
    """As its user starts it: in the project's folder, which is not installed."""
    done = subprocess.run(
        [sys.executable, "-m", "fasttrain", "fit", "shapes.yaml", "--run-dir", str(tmp_path / "run"), "loggers=[]"],
        cwd=foreign_project, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "channels_last: applies - 2 convolution weights; not measured, as asked" in done.stdout
    assert "reached target" in done.stdout
    assert "warn" not in done.stderr.lower(), done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "reached_target"


def test_which_optimizations_are_asked_for_does_not_change_the_order_of_samples(recipe: Path, tmp_path: Path) -> None:
    """A check draws a batch from the project's own shuffled loader; training must not notice."""
    options = [*NEVER, "trainer.max_epochs=2"]
    plain = run(recipe, tmp_path / "plain", "optimizations=none", *options)
    ask = ["optimizations.channels_last={measure: true, least_gain: 10}", "optimizations.precision.least_gain=10"]
    asked = run(recipe, tmp_path / "asked", *ask, *options)
    verdicts = {row["verdict"] for row in json.loads((asked.folder / "plan.json").read_text())["optimizations"]}
    assert verdicts == {"refused"}
    assert logged(plain.folder) == logged(asked.folder)
    assert all(torch.equal(value, weights(asked.folder)[name]) for name, value in weights(plain.folder).items())


def test_a_run_is_the_same_as_in_plain_lightning(recipe: Path, tmp_path: Path) -> None:
    """With every optimization off, `fit` is Lightning with the same seed: bit for bit."""
    outcome = run(recipe, tmp_path / "run", "optimizations=none", *NEVER, "trainer.max_epochs=2", "seed=3")
    from shapes.data import LitShapes
    from shapes.model import LitClassifier

    L.seed_everything(3, workers=True, verbose=False)
    module = LitClassifier()
    plain_trainer(max_epochs=2, num_sanity_val_steps=0).fit(module, LitShapes())
    for name, value in module.state_dict().items():
        assert torch.equal(value, weights(outcome.folder)[name]), name


def test_the_same_optimization_in_a_plain_trainer(recipe: Path) -> None:
    from shapes.data import LitShapes
    from shapes.model import LitClassifier

    modules, losses = [], []
    for callbacks in ([], [ChannelsLast()]):
        L.seed_everything(0, verbose=False)
        module = LitClassifier(dropout=0.0)
        trainer = plain_trainer(max_epochs=2, num_sanity_val_steps=0, callbacks=callbacks)
        trainer.fit(module, LitShapes())
        modules.append(module)
        losses.append(float(trainer.callback_metrics["train_loss"]))
    plain, ours = modules
    assert ours.net[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert list(ours.state_dict()) == list(plain.state_dict())
    # The loss, not the weights: a bias before a batch norm follows rounding errors and matters to nothing.
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_checkpoints_load_in_both_directions(recipe: Path, tmp_path: Path) -> None:
    from shapes.data import LitShapes
    from shapes.model import LitClassifier

    ours = run(recipe, tmp_path / "run", *NEVER, "trainer.max_epochs=2", "module.width=4")
    checkpoint = ours.folder / "checkpoints" / "last.ckpt"
    # Written with the optimization on: into plain Lightning, the weights alone and the whole training.
    module = LitClassifier.load_from_checkpoint(checkpoint)
    assert module.hparams.width == 4
    trainer = plain_trainer(max_epochs=3)
    trainer.fit(module, LitShapes(), ckpt_path=checkpoint)
    assert trainer.global_step == 18
    # Written by plain Lightning: scored, and gone on with, by fasttrain.
    trainer.save_checkpoint(checkpoint)
    scores = validate(checkpoint, [], CATALOGUE, console=Console(file=open(os.devnull, "w")), quiet=True)  # noqa: SIM115
    assert scores["val_acc"] > 0.9
    config = ours.folder / "config.yaml"
    again = run(config, tmp_path, "trainer.max_epochs=4", resume=ours.folder)
    assert again.result["steps"] == 24
    assert json.loads((ours.folder / "validation.json").read_text())["scores"] == scores


def test_stopped_after_an_epoch_and_resumed(recipe: Path, tmp_path: Path) -> None:
    """Its loader knows nothing of resuming, but at the end of an epoch the random state is all that there is."""
    options = [*NEVER, "trainer.max_epochs=4"]
    whole = run(recipe, tmp_path / "whole", *options)
    run(recipe, tmp_path / "parts", *NEVER, "trainer.max_epochs=2")
    resumed = run(tmp_path / "parts" / "config.yaml", tmp_path, "trainer.max_epochs=4", resume=tmp_path / "parts")
    assert logged(whole.folder) == logged(resumed.folder)
    assert resumed.result["samples"] == whole.result["samples"] == 4 * 96
    assert all(torch.equal(value, weights(resumed.folder)[name]) for name, value in weights(whole.folder).items())


def test_a_run_that_reached_its_target_stops_at_once_when_resumed(recipe: Path, tmp_path: Path) -> None:
    first = run(recipe, tmp_path / "run", "loggers=[]")
    again = run(first.folder / "config.yaml", tmp_path, resume=first.folder)
    for key in ("status", "steps", "samples", "quality", "reached_at"):
        assert again.result[key] == first.result[key], key
    more = run(first.folder / "config.yaml", tmp_path, "target.value=1.5", "trainer.max_epochs=3", resume=first.folder)
    assert (more.result["status"], more.result["reached_at"]) == ("finished", None)
    assert more.result["steps"] > first.result["steps"]


def test_the_saved_configuration_trains_the_same(recipe: Path, tmp_path: Path) -> None:
    first = run(recipe, tmp_path / "first", *NEVER, "trainer.max_epochs=1", "module.betas.1=0.95", "data.batch_size=8")
    second = run(first.folder / "config.yaml", tmp_path / "second")
    assert (second.folder / "config.yaml").read_text() == (first.folder / "config.yaml").read_text()
    assert logged(second.folder) == logged(first.folder)


def test_a_failed_start_leaves_its_reason_and_a_folder_to_use_again(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^optimizations\.nope: there is no such optimization; "):
        run(recipe, tmp_path / "run", "optimizations.nope={}")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["status"] == "failed"
    assert result["error"].startswith("optimizations.nope: there is no such optimization; ")
    assert run(recipe, tmp_path / "run", "loggers=[]").result["status"] == "reached_target"


def test_refused_optimizations_can_be_an_error(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(OptimizationError) as caught:
        run(recipe, tmp_path / "run", "refused_optimizations=error", "optimizations={precision: {least_gain: 10}}")
    said = str(caught.value)
    assert said.startswith("refused_optimizations=error, and these do not apply here: precision: fp32 is the fastest ")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("target.metric=map", "target.metric is 'map', but LitClassifier logs no such value in validation; it logs: "),
        ("loggers=[wandbb]", "loggers: 'wandbb' is unknown; use tensorboard, csv, or a mapping with the class of a "),
        ("trainer.precision=fp8", "trainer: Lightning refuses these values: Precision 'fp8' is invalid."),
        ("trainer.max_time=soon", "trainer: Lightning refuses these values: `Timer(duration='soon')` is not a valid "),
    ],
)
def test_what_only_shows_when_it_starts(recipe: Path, tmp_path: Path, override: str, sentence: str) -> None:
    with pytest.raises(FasttrainError) as caught:
        run(recipe, tmp_path / "run", override)
    assert str(caught.value).startswith(sentence)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["error"] == str(caught.value)


def test_hyperparameters_that_are_python_objects(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shapes.model import LitClassifier

    monkeypatch.setattr(
        LitClassifier, "on_save_checkpoint", lambda self, checkpoint: checkpoint.update(made_by=LitClassifier)
    )
    outcome = run(recipe, tmp_path / "run", *NEVER, "trainer.max_epochs=1")
    with pytest.raises(FasttrainError) as caught:
        run(outcome.folder / "config.yaml", tmp_path, "trainer.max_epochs=2", resume=outcome.folder)
    assert str(caught.value) == (
        f"the checkpoint {outcome.folder / 'checkpoints' / 'last.ckpt'} holds an object of Python code "
        "(shapes.model.LitClassifier), which torch does not load unasked: leave it out by "
        "save_hyperparameters(ignore=[...]) in the module, or set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 if you trust the "
        "file."
    )


def test_no_handler_stays_behind(recipe: Path, tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run(recipe, tmp_path / "run", "loggers=[]")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_sigterm_is_a_wish_to_stop_with_a_checkpoint(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a cluster that takes the machine back; here at an epoch's last step, where the stop has to wait."""
    from shapes.model import LitClassifier

    def step(self: LitClassifier, batch: Any, batch_idx: int) -> None:
        if self.global_step == 6 and batch_idx == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        plain(self, batch, batch_idx)

    plain = LitClassifier.validation_step
    monkeypatch.setattr(LitClassifier, "validation_step", step)
    outcome = run(recipe, tmp_path / "run", *NEVER)
    assert (outcome.result["status"], outcome.result["steps"], outcome.result["error"]) == ("interrupted", 6, None)
    monkeypatch.setattr(LitClassifier, "validation_step", plain)
    again = run(tmp_path / "run" / "config.yaml", tmp_path, "trainer.max_epochs=2", resume=tmp_path / "run")
    assert (again.result["status"], again.result["steps"]) == ("finished", 12)
