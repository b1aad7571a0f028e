"""What an optimization tells when a run has ended: it is in the run folder however the run ended, and in the report."""

import io
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
from rich.console import Console

from fasttrain.callbacks import CATALOGUE
from fasttrain.fit import Outcome, fit
from fasttrain.optimization import Applies, Attachment, Change, Context, Optimization, Stage, Table, Verdict
from fasttrain.recipe import resolve
from fasttrain.report import print_report
from fasttrain.run_summary import load_run

ON = "optimizations.counting={}"


@dataclass(frozen=True)
class CountingConfig:
    fails_at: int = -1
    """Step at which training fails."""
    interrupts_at: int = -1
    """Step at which a signal arrives."""
    stops_at: int = -1
    """Step at which a second Ctrl-C stops at once."""
    attaches: bool = True
    tells: bool = True


class CountsBatches(pl.Callback):
    def __init__(self, config: CountingConfig) -> None:
        self.config, self.batches, self.ended = config, 0, False

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.batches += 1
        if self.batches == self.config.fails_at:
            raise RuntimeError("the cable was pulled")
        if self.batches == self.config.interrupts_at:
            os.kill(os.getpid(), signal.SIGINT)
        if self.batches == self.config.stops_at:
            raise KeyboardInterrupt

    def teardown(self, *_: Any, stage: str) -> None:
        self.ended = True

    def on_exception(self, *_: Any) -> None:
        self.ended = True


class Counting(Optimization[CountingConfig]):
    name: ClassVar[str] = "counting"
    summary: ClassVar[str] = "for tests"
    config_class: ClassVar[type[Any]] = CountingConfig
    stage: ClassVar[Stage] = Stage.CALLBACK
    grade = "same numbers"

    def check(self, context: Context) -> Verdict:
        self.callback = CountsBatches(self.config)
        return Applies()

    def attach(self, context: Context) -> Attachment:
        if not self.config.attaches:
            raise RuntimeError("no attachment today")
        return Attachment(callbacks=[self.callback])

    def applied(self) -> Sequence[Change]:
        return [Change("batches", "counted")]

    def outcome(self) -> Sequence[Table]:
        assert self.callback.ended, "asked for when the run has ended"
        if not self.config.tells:
            raise KeyError("signature")
        return [Table("batches", ("kind", "count", "share"), [("all", self.callback.batches, 1.0)], "Counted here.")]


ROOMS = {**CATALOGUE, "counting": Counting}


@pytest.fixture
def recipe(foreign_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fasttrain.session.write_plots", lambda folder: [])
    return foreign_project / "shapes.yaml"


def run(
    recipe: Path, run_dir: Path | None, *overrides: str, resume: Path | None = None, console: Any = None
) -> Outcome:
    """Train the six steps of one epoch, or what the overrides say."""
    options = ["target.value=2", "trainer.max_epochs=1", "loggers=[]", *overrides]
    console = Console(file=console or io.StringIO(), width=200)
    return fit(resolve(recipe, options), ROOMS, run_dir=run_dir, resume=resume, console=console)


def told(folder: Path) -> Any:
    return json.loads((folder / "optimizations.json").read_text())["optimizations"]


def batches_told(folder: Path) -> Any:
    (counting,) = told(folder)
    return counting["tables"][0]["rows"][0][1]


@pytest.mark.parametrize(
    ("override", "status", "batches"),
    [
        ("trainer.max_epochs=1", "finished", 6),
        ("target.value=0", "reached_target", 6),
        ("optimizations.counting.interrupts_at=2", "interrupted", 2),
        ("optimizations.counting.stops_at=3", "interrupted", 3),
    ],
)
def test_it_tells_however_the_run_ended(recipe: Path, tmp_path: Path, override: str, status: str, batches: int) -> None:
    outcome = run(recipe, tmp_path / "run", ON, override)
    assert outcome.result["status"] == status
    assert told(outcome.folder) == [
        {
            "name": "counting",
            "tables": [
                {
                    "title": "batches",
                    "columns": ["kind", "count", "share"],
                    "rows": [["all", batches, 1.0]],
                    "note": "Counted here.",
                }
            ],
            "error": None,
        }
    ]
    console = Console(width=100, record=True, file=io.StringIO())
    print_report([load_run(outcome.folder)], console)
    shown = console.export_text()
    assert shown.index("Optimizations") < shown.index("counting: batches") < shown.index("Counted here.")


def test_it_tells_of_a_run_that_failed_and_the_failure_stays(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^the cable was pulled$"):
        run(recipe, tmp_path / "run", ON, "optimizations.counting.fails_at=4")
    assert batches_told(tmp_path / "run") == 4
    assert json.loads((tmp_path / "run" / "result.json").read_text())["error"] == "RuntimeError: the cable was pulled"


def test_a_run_that_never_trained_is_not_asked(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^no attachment today$"):
        run(recipe, tmp_path / "run", ON, "optimizations.counting.attaches=false")
    assert not (tmp_path / "run" / "optimizations.json").exists()


def test_a_run_without_such_optimizations_leaves_no_file(recipe: Path, tmp_path: Path) -> None:
    outcome = run(recipe, tmp_path / "run")
    (channels_last,) = load_run(outcome.folder).optimizations or ()
    assert channels_last.verdict == "applies", "one that tells nothing"
    assert not (outcome.folder / "optimizations.json").exists()
    assert not [problem for problem in load_run(outcome.folder).problems if "optimizations" in problem]


def test_one_that_fails_to_tell_costs_its_tables_alone(recipe: Path, tmp_path: Path) -> None:
    printed = io.StringIO()
    outcome = run(recipe, tmp_path / "run", ON, "optimizations.counting.tells=false", console=printed)
    assert outcome.result["status"] == "finished"
    assert told(outcome.folder) == [{"name": "counting", "tables": [], "error": "KeyError: 'signature'"}]
    assert "not written: what counting did over the run: KeyError: 'signature'\n" in printed.getvalue()
    sentence = "counting failed to tell what it did over the run: KeyError: 'signature'"
    assert sentence in load_run(outcome.folder).problems


def test_of_a_resumed_run_the_last_part_tells(recipe: Path, tmp_path: Path) -> None:
    folder = run(recipe, tmp_path / "run", ON).folder
    config = folder / "config.yaml"
    with pytest.raises(RuntimeError, match=r"^no attachment today$"):
        run(config, None, "trainer.max_epochs=2", "optimizations.counting.attaches=false", resume=folder)
    assert batches_told(folder) == 6, "what never trained has nothing to put in its place"
    again = ("optimizations.counting.attaches=true", "trainer.max_epochs=3")
    run(config, None, *again, resume=folder)
    assert batches_told(folder) == 12
    run(config, None, "trainer.max_epochs=4", "optimizations.counting=false", resume=folder)
    assert told(folder) == [], "else a report would show the tables of one that is off"
