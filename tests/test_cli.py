"""The command line: help that teaches, overrides that mean what they say, and one sentence for each mistake."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from fasttrain import __version__
from fasttrain.callbacks import CATALOGUE
from fasttrain.cli import main
from fasttrain.errors import ConfigError
from fasttrain.recipe import recipe_names


class Said:
    """What a command printed and how it ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


Run = Callable[..., Said]


@pytest.fixture
def fasttrain(
    capsys: pytest.CaptureFixture[str], foreign_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Run a command in an empty folder, with a recipe of the foreign project beside it as shapes.yaml."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("COLUMNS", "200")
    shutil.copy(foreign_project / "shapes.yaml", tmp_path)

    def run(*arguments: str) -> Said:
        capsys.readouterr()
        try:
            main(list(arguments))
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
        printed = capsys.readouterr()
        return Said(code, printed.out, printed.err)

    return run


def row(out: str, key: str) -> list[str]:
    """The cells of the line of `explain` that begins with a key."""
    (line,) = [line for line in out.splitlines() if line.split(" ")[0] == key]
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


@pytest.mark.parametrize(
    ("command", "taught"),
    [
        ([], ["fasttrain fit retinanet", "trainer.max_epochs=3", "explain", "report"]),
        (["fit"], ["--run-dir", "--resume", "config.yaml", "Ctrl-C", "data.batch_size=8", "optimizations=none"]),
        (["validate"], ["run folder", "best checkpoint", "KEY=VALUE"]),
        (["explain"], ["where it came from", "why not"]),
        (["list"], ["recipes", "optimizations"]),
        (["report"], ["HTML", "--out"]),
        (["bench"], ["--out", "--list", "plain"]),
        (["bench", "ablate"], ["--only", "--limit-seconds", "left out", "Ctrl-C keeps"]),
    ],
    ids=str,
)
def test_help_teaches(fasttrain: Run, command: list[str], taught: list[str]) -> None:
    said = fasttrain(*command, "--help")
    assert said.code == 0
    text = " ".join(said.out.replace("│", " ").split())
    for words in taught:
        assert words in text
    assert "[bold]" not in said.out


def test_without_a_command_the_help_is_shown(fasttrain: Run) -> None:
    said = fasttrain()
    assert "fasttrain fit retinanet" in said.out + said.err


def test_version(fasttrain: Run) -> None:
    assert fasttrain("--version").out.strip() == __version__


def test_list(fasttrain: Run) -> None:
    said = fasttrain("list")
    assert said.code == 0
    for name, path in recipe_names().items():
        assert name in said.out
        assert yaml.safe_load(path.read_text())["summary"] in said.out
    for name, room in CATALOGUE.items():
        assert name in said.out
        assert room.summary in said.out
        assert room.grade in said.out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["fit"], "name a recipe: `fasttrain fit retinanet`, a YAML file, or --resume with a run folder."),
        (["fit", "retinanett"], "there is no recipe 'retinanett'; did you mean 'retinanet'?"),
        (
            ["fit", "trainer.max_epochs=3"],
            "'trainer.max_epochs=3' stands where the recipe is named; write it after the recipe.",
        ),
        (
            ["fit", "shapes.yaml", "max_epochs"],
            "'max_epochs' isn't an override: write key=value, for instance trainer.max_epochs=3.",
        ),
        (["explain", "shapes.yaml", "target.mode=maximum"], "target.mode is maximum; one of max, min is expected."),
        (
            ["explain", "shapes.yaml", "trainer.max_epoch=3"],
            "unknown key 'trainer.max_epoch'; did you mean 'max_epochs'?",
        ),
        (["explain", "shapes.yaml", "module.witdh=3"], "unknown key 'module.witdh'; did you mean 'width'?"),
        (
            ["fit", "shapes.yaml", "trainer.max_epochs=abc"],
            "trainer.max_epochs is abc; an integer or null is expected.",
        ),
        (["fit", "shapes.yaml", "preset=full"], "preset=full: shapes.yaml has no presets."),
        (
            ["fit", "shapes.yaml", "hardware=tpu"],
            "hardware=tpu: there is no such file in configs/hardware; did you mean 'gpu'?",
        ),
        (
            ["explain", "shapes.yaml", "optimizations.chanels_last=false"],
            "optimizations.chanels_last: there is no such optimization; did you mean 'channels_last'?",
        ),
        (
            ["explain", "shapes.yaml", "optimizations.channels_last.measur=false"],
            "optimizations.channels_last: unknown key 'measur'; did you mean 'measure'?",
        ),
        (
            ["fit", "shapes.yaml", "--run-dir", "shapes.yaml"],
            "the run folder shapes.yaml can't be written (File exists); give another with --run-dir.",
        ),
        (
            ["fit", "--resume", "shapes.yaml"],
            "shapes.yaml is no run folder: it holds no config.yaml; `fasttrain fit` makes one with config.yaml, "
            "result.json and checkpoints/.",
        ),
        (
            ["fit", "--resume", "gone"],
            "gone is no run folder: it does not exist; `fasttrain fit` makes one with config.yaml, result.json and "
            "checkpoints/.",
        ),
        (
            ["fit", "shapes.yaml", "--resume", "gone"],
            "--resume goes on with the recipe of gone; leave 'shapes.yaml' out.",
        ),
        (
            ["fit", "--resume", "gone", "--run-dir", "x"],
            "--resume goes on in the run's own folder; leave --run-dir out.",
        ),
        (
            ["validate", "gone"],
            "gone is no run folder: it does not exist; `fasttrain fit` makes one with config.yaml, result.json and "
            "checkpoints/.",
        ),
        (
            ["report", "gone"],
            "'gone' does not exist; a run folder is written by `fasttrain fit` and holds config.yaml, "
            "environment.json, plan.json, metrics.csv, result.json.",
        ),
    ],
)
def test_a_mistake_is_one_sentence_on_stderr(fasttrain: Run, arguments: list[str], sentence: str) -> None:
    said = fasttrain(*arguments)
    assert said.err == f"error: {sentence}\n"
    assert said.out == ""
    assert said.code == 2


def test_a_sentence_with_brackets_is_no_markup(fasttrain: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Path:
        raise ConfigError(r"a [bold]value[/bold], a \[path] and [1, 2]")

    monkeypatch.setattr("fasttrain.recipe.find_recipe", fail)
    assert fasttrain("explain", "x").err == "error: a [bold]value[/bold], a \\[path] and [1, 2]\n"


def test_a_bug_of_ours_keeps_its_traceback(fasttrain: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Path:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("fasttrain.recipe.find_recipe", fail)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        fasttrain("explain", "x")


def test_explain_shows_values_origins_and_the_plan(fasttrain: Run) -> None:
    said = fasttrain("explain", "shapes.yaml", "module.betas.0=0.5", "loggers=[csv, tensorboard]", "seed=1")
    assert said.code == 0
    assert row(said.out, "module.class") == ["module.class", "shapes.model.LitClassifier", "shapes.yaml"]
    assert row(said.out, "module.betas") == ["module.betas", "[0.5, 0.99]", "command line"]
    assert row(said.out, "loggers") == ["loggers", "[csv, tensorboard]", "command line"]
    assert row(said.out, "module.activation") == ["module.activation", "(left to the class)", "default"]
    assert row(said.out, "trainer.max_epochs") == ["trainer.max_epochs", "20", "shapes.yaml"]
    assert row(said.out, "trainer.accelerator")[2].startswith("hardware ")
    assert row(said.out, "target.value") == ["target.value", "0.9", "shapes.yaml"]
    assert "1. channels_last: applies - 2 convolution weights; not measured, as asked" in said.out
    assert not Path("runs").exists(), "explain makes no run folder"


def test_explain_says_why_not(fasttrain: Run) -> None:
    said = fasttrain("explain", "shapes.yaml", "optimizations.channels_last={measure: true, least_gain: 9}")
    assert "1. channels_last: refused - not faster here: " in said.out
    assert (
        "channels_last: off - switched off"
        in fasttrain("explain", "shapes.yaml", "optimizations.channels_last=false").out
    )
    assert "plan: no optimizations asked for" in fasttrain("explain", "shapes.yaml", "optimizations=none").out


def test_what_explain_shows_can_be_written_as_an_override(fasttrain: Run) -> None:
    out = fasttrain("explain", "shapes.yaml").out
    cells = [row(out, key) for key in ("module.lr", "module.betas", "data.count", "target.stop", "loggers", "preset")]
    again = fasttrain("explain", "shapes.yaml", *[f"{key}={value}" for key, value, _ in cells if key != "preset"]).out
    for key, value, _ in cells[:-1]:
        assert row(again, key) == [key, value, "command line"]


def test_a_run_from_beginning_to_report(fasttrain: Run) -> None:
    said = fasttrain("fit", "shapes.yaml", "trainer.max_epochs=1", "target.value=2", "--run-dir", "run", "loggers=[]")
    assert said.code == 0
    assert "run folder: run" in said.out
    assert json.loads(Path("run/result.json").read_text())["status"] == "finished"

    again = fasttrain("fit", "shapes.yaml", "--run-dir", "run")
    assert again.err == "error: run holds a run already; go on with it by --resume run, or give another --run-dir.\n"
    assert again.code == 2

    # An override may stand in the recipe's place.
    resumed = fasttrain("fit", "--resume", "run", "trainer.max_epochs=2", "--quiet")
    assert (resumed.code, resumed.out) == (0, "")
    result = json.loads(Path("run/result.json").read_text())
    assert (result["steps"], result["samples"]) == (12, 192)
    assert yaml.safe_load(Path("run/config.yaml").read_text())["trainer"]["max_epochs"] == 2

    for what in ("run", "run/checkpoints/best.ckpt"):
        scored = fasttrain("validate", what, "--quiet")
        assert scored.code == 0
        assert scored.out.startswith("val_acc 1.0000")
        assert "Tip" not in scored.err

    misfit = fasttrain("validate", "run", "module.width=3")
    assert misfit.code == 2
    assert misfit.err.startswith(
        "error: the checkpoint run/checkpoints/best.ckpt does not fit the configured model: size "
    )

    reported = fasttrain("report", "run", "--out", "page.html")
    assert reported.code == 0
    assert "val_acc" in reported.out
    assert "<html" in Path("page.html").read_text()[:200].lower()


def test_the_config_of_a_run_folder_explains_to_the_same_values(fasttrain: Run) -> None:
    fasttrain(
        "fit", "shapes.yaml", "module.width=4", "data.count=64", "--run-dir", "run", "--quiet", "trainer.max_epochs=1"
    )
    first = fasttrain("explain", "shapes.yaml", "module.width=4", "data.count=64", "trainer.max_epochs=1").out
    again = fasttrain("explain", "run/config.yaml").out

    def values(out: str) -> list[list[str]]:
        return [cells[:2] for line in out.split("\n\n")[0].splitlines()[1:] if (cells := row(out, line.split(" ")[0]))]

    assert values(again) == values(first)
    assert row(again, "module.width")[2] == "config.yaml"


def test_bench_lists_and_refuses(fasttrain: Run) -> None:
    listed = fasttrain("bench", "--list")
    assert listed.code == 0
    for name in CATALOGUE:
        assert f"{name}/" in listed.out
    unknown = fasttrain("bench", "chanels_last")
    assert (unknown.code, unknown.err) == (
        2,
        "error: there is no bench case 'chanels_last'; did you mean 'channels_last'?\n",
    )
    unwritable = fasttrain("bench", "channels_last", "--out", "shapes.yaml/rows.csv")
    assert unwritable.code == 2
    assert unwritable.err.startswith("error: the rows can't be written to shapes.yaml/rows.csv (")
