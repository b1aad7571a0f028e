"""The run folder: whole files or none, no two runs in one, and metrics that survive a crash and a resume."""

import csv
import errno
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

from fasttrain.errors import ConfigError, DataError
from fasttrain.results import METRICS_HEADER, MetricsFile, RunFolder, disk_error


def test_a_new_folder_has_its_parts(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "a" / "b", "probe")
    assert {path.name for path in folder.path.iterdir()} == {"plots", "samples", "checkpoints"}
    assert (folder.checkpoints, folder.metrics) == (folder.path / "checkpoints", folder.path / "metrics.csv")


def test_the_default_folder_is_named_for_recipe_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [RunFolder.create(None, "probe").path for _ in range(3)]
    assert len(set(paths)) == 3, "runs begun in the same second get folders of their own"
    assert all(re.fullmatch(r"runs/probe/\d{8}-\d{6}(-\d)?", str(path)) for path in paths)


def test_a_folder_that_holds_a_run(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "probe")
    folder.write_text("config.yaml", "recipe: probe\n")
    with pytest.raises(ConfigError) as caught:
        RunFolder.create(tmp_path / "run", "probe")
    assert str(caught.value) == (
        f"{folder.path} holds a run already; go on with it by --resume {folder.path}, or give another --run-dir."
    )


def test_a_folder_whose_run_never_began_can_be_used_again(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "probe")
    folder.write_json("result.json", {"status": "failed", "error": "a mistyped key"})
    RunFolder.create(tmp_path / "run", "probe")


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_folder_that_cant_be_made(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        RunFolder.create(tmp_path / place, "probe")
    why = os.strerror(errno.EEXIST if place == "file" else errno.ENOTDIR)
    assert str(caught.value) == (
        f"the run folder {tmp_path / place} can't be written ({why}); give another with --run-dir."
    )


def test_no_run_folder(tmp_path: Path) -> None:
    makes = "`fasttrain fit` makes one with config.yaml, result.json and checkpoints/."
    for path, found in ((tmp_path, "holds no config.yaml"), (tmp_path / "gone", "does not exist")):
        with pytest.raises(ConfigError) as caught:
            RunFolder.existing(path)
        assert str(caught.value) == f"{path} is no run folder: it {found}; {makes}"
    (tmp_path / "config.yaml").write_text("")
    assert RunFolder.existing(tmp_path).path == tmp_path


def test_json_is_valid_whatever_was_measured(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    value = {"a": math.nan, "b": [math.inf, 1.5, (2, -math.inf)], "c": {"d": None, "é": "ü"}}
    folder.write_json("x.json", value)
    assert json.loads((tmp_path / "x.json").read_text()) == {
        "a": None, "b": [None, 1.5, [2, None]], "c": {"d": None, "é": "ü"},
    }  # fmt: skip
    assert folder.read_json("x.json")["b"] == [None, 1.5, [2, None]]


@pytest.mark.parametrize("content", [None, "", "{", "[1]"])
def test_reading_what_is_absent_or_damaged(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "x.json").write_text(content)
    assert RunFolder(tmp_path).read_json("x.json") == {}


def test_a_full_disk_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    folder.write_text("x.json", "old")
    plain = Path.write_text

    def half(self: Path, text: str, **options: Any) -> int:
        plain(self, text[: len(text) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(DataError) as caught:
        folder.write_text("x.json", "new and longer")
    assert str(caught.value) == (
        f"{tmp_path / 'x.json'} can't be written: the disk is full; make room or choose another --run-dir, then go on "
        "with --resume."
    )
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    assert (tmp_path / "x.json").read_text() == "old"


def test_another_reason(tmp_path: Path) -> None:
    said = str(disk_error(tmp_path, PermissionError(errno.EACCES, "Permission denied")))
    assert said.startswith(f"{tmp_path} can't be written: Permission denied; ")


def rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_metrics_are_a_line_a_value(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.csv")
    file.seconds = lambda: 1.23456
    file.log_metrics({"loss": 0.1, "lr": 1e-3, "epoch": 0}, step=0)
    assert not file.path.exists(), "nothing is written until Lightning says so"
    file.save()
    file.log_metrics({"map": math.nan}, step=4)
    file.finalize("success")
    file.save()
    assert rows(file.path) == [
        list(METRICS_HEADER),
        ["0", "0", "1.235", "loss", "0.1"],
        ["0", "0", "1.235", "lr", "0.001"],
        ["4", "", "1.235", "map", "nan"],
    ]
    assert float(rows(file.path)[1][-1]) == 0.1, "exactly the float that was logged"


def test_a_resumed_run_takes_back_what_it_will_log_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    file = MetricsFile(path)
    file.forget_from(3)
    for step in range(6):
        file.log_metrics({"loss": step}, step)
    file.save()
    with path.open("a") as raw:
        raw.write("6,0,1.0,lo")  # the line at which the process died
    again = MetricsFile(path)
    again.forget_from(4)
    assert [row[0] for row in rows(path)[1:]] == ["0", "1", "2", "3"]
    again.log_metrics({"loss": 4}, 4)
    again.save()
    assert [row[0] for row in rows(path)[1:]] == ["0", "1", "2", "3", "4"]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.csv"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_metrics_on_a_full_disk_are_kept_for_later(tmp_path: Path) -> None:
    file = MetricsFile(Path("/dev/full"))
    file.log_metrics({"loss": 1.0}, 0)
    with pytest.raises(DataError, match=r"^/dev/full can't be written: the disk is full; make room or choose"):
        file.save()
    file.path = tmp_path / "metrics.csv"
    file.save()
    assert rows(file.path)[1][-2:] == ["loss", "1.0"]
