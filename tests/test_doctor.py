"""`fasttrain doctor`: from a recipe to the lines that keep its step from being captured, and one verdict."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from fasttrain.callbacks.cuda_graph_step.sync_finder.finder import UNSEEN_ON_CPU
from fasttrain.cli import main
from fasttrain.doctor import can_be_captured, findings_table, verdict

Doctor = Callable[..., tuple[int, str, str]]

MODELS = """\
import torch
from shapes.model import LitClassifier


class Syncs(LitClassifier):
    def training_step(self, batch, batch_idx):
        images, labels = batch
        hard = images[labels == 1]
        loss = super().training_step(batch, batch_idx) + hard.mean()
        self.log("loss_value", loss.item())
        return loss


class Counts(LitClassifier):
    def __init__(self):
        super().__init__()
        self.count = 0
        self.average = torch.zeros(())

    def training_step(self, batch, batch_idx):
        self.count += 1
        return super().training_step(batch, batch_idx)


class Averages(Counts):
    def training_step(self, batch, batch_idx):
        loss = LitClassifier.training_step(self, batch, batch_idx)
        self.average = 0.9 * self.average + loss.detach()
        return loss


class Breaks(LitClassifier):
    def training_step(self, batch, batch_idx):
        raise KeyError("pixels")
"""


@pytest.fixture
def doctor(
    capsys: pytest.CaptureFixture[str], foreign_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Doctor:
    """Run `fasttrain doctor` in a folder with the foreign project's recipe and models of its user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("COLUMNS", "300")
    shutil.copy(foreign_project / "shapes.yaml", tmp_path)
    (tmp_path / "more_models.py").write_text(MODELS)
    sys.modules.pop("more_models", None)

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["doctor", *arguments, "hardware=cpu"])
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


def lines(out: str) -> list[str]:
    return [line.strip() for line in out.splitlines() if line.strip()]


def test_a_clean_foreign_project(doctor: Doctor) -> None:
    code, out, err = doctor("shapes.yaml", "trainer.precision=bf16-mixed")
    assert (code, err) == (0, "")
    assert [" ".join(line.split()) for line in lines(out)] == [
        "step shapes.model.LitClassifier.training_step, forward and backward",
        "on cpu, precision bf16-mixed, no optimization applied",
        "batch float32[16, 3, 16, 16], int64[16]",
        UNSEEN_ON_CPU,
        "The step can be captured whole.",
    ]
    assert not Path("runs").exists()


def test_the_shipped_recipe(doctor: Doctor) -> None:
    code, out, err = doctor("retinanet", "data.generated.train_images=16", "data.generated.val_images=4")
    assert (code, err) == (0, "")
    assert "RetinaNetTraining.training_step, forward and backward" in out
    assert "uint8[16, 3, 96, 96], float32[16, 20, 4], " in out
    assert lines(out)[-1] == "The step can be captured whole."


def test_each_place_with_its_line_and_cure(doctor: Doctor) -> None:
    code, out, err = doctor("shapes.yaml", "module=more_models.Syncs")
    assert (code, err) == (1, "")
    said = lines(out)
    first = said.index("1.  boolean indexing  more_models.py:8")
    assert said[first + 1] == "hard = images[labels == 1]"
    assert said[first + 2].startswith("x[mask] has as many elements as the mask has True")
    assert said[first + 3].startswith("cure: keep the shape: torch.where(mask, x, 0)")
    assert "2.  value read on the host  more_models.py:10" in said
    assert "3.  host number logged  more_models.py:10" in said
    assert said[-1] == "2 places break a capture; 1 note."


def test_what_only_freezes_or_needs_nothing(doctor: Doctor) -> None:
    code, out, _ = doctor("shapes.yaml", "module=more_models.Counts")
    assert code == 1
    assert "1.  host value changed  more_models.py:21" in lines(out)
    assert "self.count goes from 1 to 2 on the host; a replay leaves it as it is" in lines(out)
    assert lines(out)[-1] == "1 place would not be done again by a replay."
    code, out, _ = doctor("shapes.yaml", "module=more_models.Averages")
    assert code == 0
    assert "1.  tensor replaced  more_models.py:28" in lines(out)
    assert lines(out)[-1] == "The step can be captured whole; 1 note."


def test_a_step_that_cant_run_is_one_sentence(doctor: Doctor) -> None:
    code, _, err = doctor("shapes.yaml", "module=more_models.Breaks")
    assert code == 2
    assert err == "error: Breaks.training_step could not be run outside of a fit (KeyError: 'pixels').\n"


def test_the_help_teaches(doctor: Doctor) -> None:
    code, out, _ = doctor("--help")
    assert code == 0
    text = " ".join(out.replace("│", " ").split())
    for words in ("captured as a CUDA graph", ".item(), boolean indexing", "Exit status 1"):
        assert words in text


def some(count: int, breaks: bool = False, freezes: bool = False) -> list[Any]:
    words = {"kind": "a kind", "where": "a.py:1", "code": "x[mask]", "user_where": None, "what": "w", "cure": "c"}
    return [SimpleNamespace(**words, count=1, breaks=breaks, freezes=freezes)] * count


@pytest.mark.parametrize(
    ("findings", "sentence"),
    [
        ([], "The step can be captured whole."),
        (some(2), "The step can be captured whole; 2 notes."),
        (some(1, breaks=True), "1 place breaks a capture."),
        (
            some(3, breaks=True) + some(2, freezes=True) + some(1),
            "3 places break a capture; 2 places would not be done again by a replay; 1 note.",
        ),
    ],
)
def test_the_verdict(findings: list[Any], sentence: str) -> None:
    assert verdict(findings) == sentence
    assert can_be_captured(findings) == sentence.startswith("The step can be captured whole")


def test_a_finding_from_a_library_without_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = some(1, breaks=True)
    found.user_where, found.count = "mine.py:3", 4
    (other,) = some(1)
    other.where, other.code = None, ""
    Console(width=100).print(findings_table([found, other]))
    assert lines(capsys.readouterr().out) == [
        "1.  a kind  a.py:1  (4 times)",
        "x[mask]",
        "called from mine.py:3",
        "w",
        "cure: c",
        "2.  a kind  at a line that could not be told",
        "w",
        "cure: c",
    ]


def test_without_a_gpu_none_is_asked_for(doctor: Doctor) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    code, _, err = doctor("shapes.yaml", "trainer.accelerator=gpu")
    assert code == 2
    assert "torch sees no GPU here" in err
