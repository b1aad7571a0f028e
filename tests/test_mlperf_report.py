"""Scores, checkers and public numbers in reports, and the estimated time to train."""

import io
import json
import math
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlperf_fits import write_result
from rich.console import Console
from typer.testing import CliRunner

from fasttrain.batch_plan import BatchPlan
from fasttrain.cli import app, main
from fasttrain.errors import ConfigError, DataError, MissingDependencyError
from fasttrain.mlperf import checks
from fasttrain.mlperf.projection import Assumptions, estimate, estimate_lines, rate_from_rows
from fasttrain.mlperf.public import anchors, expected_to_converge, reference_points, shown_anchors
from fasttrain.mlperf.result import read_result
from fasttrain.mlperf.score import REQUIRED_RUNS, olympic_mean
from fasttrain.mlperf.tables import mlperf_tables, scores_table
from fasttrain.report import TextTable, print_tables

with_checker = pytest.mark.skipif(find_spec("mlperf_logging") is None, reason="mlperf-logging is not installed")


def cells(table: TextTable, column: str) -> list[str]:
    return [row[table.columns.index(column)] for row in table.rows]


# ---- scores ----------------------------------------------------------------------------------------------------------


def test_the_fastest_and_the_slowest_run_do_not_count() -> None:
    assert olympic_mean("ssd", [10.0, 1.0, 3.0, 4.0, 5.0]) == 4.0
    assert olympic_mean("ssd", [None, 1.0, 3.0, 4.0, 5.0]) == 4.0, "one that did not converge is the slowest"
    assert olympic_mean("ssd", [None, None, 3.0, 4.0, 5.0]) is None
    assert olympic_mean("ssd", [1.0, 2.0]) is None
    assert olympic_mean("unet3d", [*[0.0] * 4, 7.0, 8.0, *[None] * 4]) == 7.5


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(1, 1e4), min_size=3, max_size=12))
def test_a_score_lies_between_the_runs_that_count(values: list[float]) -> None:
    mean = olympic_mean("resnet", values)
    inner = sorted(values)[1:-1]
    assert mean == pytest.approx(fmean(inner))


def test_a_result_file_read_back(tmp_path: Path) -> None:
    result = read_result(write_result(tmp_path / "result_0.txt", 125.0, 4))
    assert (result.benchmark, result.division, result.global_batch, result.status) == ("ssd", "closed", 256, "success")
    assert (result.seconds, result.init_seconds, result.to_converge) == (125.0, 5.0, 4)
    assert result.samples_per_second == 301.0, "the first value is warm-up"
    other = tmp_path / "result_1.txt"
    other.write_text(
        "a line of somebody's\n0: " + (tmp_path / "result_0.txt").read_text().replace('"ssd"', '"retinanet"')
    )
    assert read_result(other).benchmark == "ssd", "as later rounds call it"
    other.write_text(other.read_text()[:-20])
    with pytest.raises(DataError, match=r"result_1.txt, line \d+ is no event of MLPerf's"):
        read_result(other)


# ---- public numbers --------------------------------------------------------------------------------------------------


def test_public_results_have_sources_and_are_those_that_are_known() -> None:
    for name in (*REQUIRED_RUNS, "dlrm_dcnv2"):
        assert anchors(name)
        for anchor in anchors(name):
            assert anchor.source.startswith(f"https://github.com/mlcommons/training_results_v{anchor.round}/tree/")
            assert anchor.submitter in anchor.place
            assert anchor.minutes > 0
    h200 = [a for a in anchors("ssd") if a.accelerator == "H200-SXM5-141GB" and a.round != "5.1"]
    assert {a.samples_per_second_per_gpu for a in h200 if a.submitter == "NVIDIA"} == {300.5}
    assert max(a.samples_per_second_per_gpu or 0 for a in h200) == 312.1
    shown = shown_anchors("ssd")
    assert [a.minutes for a in shown] == sorted(a.minutes for a in shown)
    assert len(shown) < 20
    assert any(a.submitter == "NVIDIA" and a.round == "4.1" and a.minutes == 34.259 for a in shown)


@with_checker
def test_reference_points_are_the_checkers_own() -> None:
    from mlperf_logging.rcp_checker.rcp_checker import RCP_Checker

    for name in ("ssd", "resnet", "bert", "maskrcnn", "rnnt", "unet3d"):
        theirs = sorted(RCP_Checker("training", "2.0.0", name, False).rcp_data.values(), key=lambda r: r["BS"])
        ours = reference_points(name)
        assert [point.global_batch for point in ours] == [record["BS"] for record in theirs]
        assert [point.mean for point in ours] == pytest.approx([record["RCP Mean"] for record in theirs], rel=1e-4)
        assert [point.least for point in ours] == pytest.approx([record["Min Epochs"] for record in theirs], rel=1e-4)


def test_convergence_at_a_batch_that_the_reference_did_not_run() -> None:
    assert expected_to_converge("ssd", 256) == (4.0, "the reference's mean of 20 runs at 256")
    assert expected_to_converge("ssd", 384)[0] == 4.5
    assert expected_to_converge("ssd", 8)[0] == 4.0
    with pytest.raises(ConfigError, match="up to 4,096, not with 8,192; take fewer GPUs"):
        expected_to_converge("ssd", 8192)
    with pytest.raises(ConfigError, match="no reference convergence points of 'minigo', but of bert, dlrm"):
        expected_to_converge("minigo", 8)


# ---- a report --------------------------------------------------------------------------------------------------------


@with_checker
def test_a_report_scores_and_checks_the_runs_of_a_result(tmp_path: Path) -> None:
    for number, (seconds, epochs) in enumerate([(2100, 4), (2055, 4), (2052, 4), (2060, 4), (1000, 5)]):
        write_result(tmp_path / f"run{number}" / f"result_{number}.txt", seconds, epochs)
    folders = [tmp_path / f"run{number}" for number in range(5)]
    files, scores, public = mlperf_tables(folders)
    assert cells(files, "minutes") == ["35.000", "34.250", "34.200", "34.333", "16.667"]
    assert all("FAILED\nRequired EXACTLY_ONE occurrence of" in words for words in cells(files, "rules"))
    assert cells(scores, "minutes") == [f"{(2055 + 2052 + 2060) / 180:.3f}"]
    assert (cells(scores, "runs"), cells(scores, "converged")) == (["5 of 5"], ["5"])
    assert (cells(scores, "trained"), cells(scores, "reference")) == (["4"], ["4"])
    assert cells(scores, "convergence check") == ["RCP found, RCP test PASSED"]
    assert "NVIDIA v4.1" in cells(public, "who")
    assert cells(public, "source")[cells(public, "who").index("NVIDIA v4.1")].startswith("NVIDIA/results/")
    assert cells(public, "who")[-1] == "here"
    print_tables([files, scores, public], Console(file=io.StringIO(), width=160))


@with_checker
def test_runs_that_converge_faster_than_the_reference_are_found_out(tmp_path: Path) -> None:
    paths = [write_result(tmp_path / f"result_{number}.txt", 100, 3) for number in range(5)]
    verdict = checks.check_convergence(paths)
    assert not verdict.passed
    assert verdict.reasons == ("RCP found, RCP test FAILED",)


@with_checker
def test_a_score_with_a_little_less_training_is_multiplied(tmp_path: Path) -> None:
    paths = [write_result(tmp_path / f"result_{n}.txt", 600, epochs) for n, epochs in enumerate((15, 15, 15, 14, 15))]
    for path in paths:
        path.write_text(path.read_text().replace('"value": 256', '"value": 4096'))
    scores = scores_table([read_result(path) for path in paths])
    reference = expected_to_converge("ssd", 4096)[0]
    assert cells(scores, "minutes") == [f"{10 * reference / 15:.3f}"]
    assert f"times {reference / 15:.4f}, for it took less training than the reference" in scores.note


@with_checker
def test_a_missed_target_and_a_broken_file_are_told(tmp_path: Path) -> None:
    write_result(tmp_path / "result_0.txt", 100, 8, status="aborted", score=0.2)
    (tmp_path / "result_1.txt").write_text(':::MLLOG {"time_ms": 1, "key": "run_st')
    files, scores, _ = mlperf_tables([tmp_path])
    (words,) = cells(files, "rules")
    assert "run_stop: aborted, the target was not reached" in words
    assert "Failed checks for eval_accuracy : v['value'] >= 0.340" in words
    assert "result_1.txt, line 1 is no event of MLPerf's" in files.note
    assert cells(scores, "convergence check") == ["not run: it needs 3 converged runs, here are 0"]
    assert "a result needs 5 runs, here are 1" in scores.note


def test_without_the_checkers_a_report_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'fasttrain\[mlperf\]'"):
        checks.require_mlperf_logging()
    write_result(tmp_path / "result_0.txt", 100, 4)
    files, *_ = mlperf_tables([tmp_path])
    assert cells(files, "rules") == ["not checked"]
    assert "pip install 'fasttrain[mlperf]'" in files.note


@with_checker
def test_fasttrain_report_takes_a_folder_of_results_and_run_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    write_result(tmp_path / "theirs" / "result_0.txt", 2055, 4)
    main_and_exit(["report", str(tmp_path / "theirs"), "--out", str(tmp_path / "page.html")])
    assert "Time to train, as MLPerf scores it" in capsys.readouterr().out
    assert not (tmp_path / "page.html").exists(), "there is no run to show"
    write_result(tmp_path / "run" / "result_0.txt", 2055, 4)
    (tmp_path / "run" / "result.json").write_text(json.dumps({"recipe": "retinanet", "status": "reached_target"}))
    main_and_exit(["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text()
    assert "MLPerf result files" in page
    assert "ssd in public" in page


def main_and_exit(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0


# ---- an estimate -----------------------------------------------------------------------------------------------------


def test_nvidias_h200_result_follows_from_its_own_rate() -> None:
    (anchor,) = [a for a in anchors("ssd") if a.submitter == "NVIDIA" and a.round == "4.1" and "H200" in a.accelerator]
    assert anchor.samples_per_second_per_gpu is not None
    # Four gaps of about 25 s between epochs are in its log.
    known = Assumptions(
        8, 32, anchor.samples_per_second_per_gpu, 1.0, evaluation_rate=24781 / 8 / 25, first_steps_seconds=0
    )
    assert estimate("ssd", known).seconds / 60 == pytest.approx(anchor.minutes, rel=0.01)


def test_the_parts_of_an_estimate() -> None:
    given = Assumptions(8, 408, 1000.0, 0.5, 2000.0, scoring_seconds=10, scoring_hidden=False, first_steps_seconds=30)
    found = estimate("resnet", given)
    steps = BatchPlan(1_281_167, 8, 408).steps
    assert found.training == pytest.approx(found.epochs * steps * 3264 / (8 * 1000 * 0.5))
    assert found.evaluations == math.ceil(found.epochs / 4) == 9
    assert found.evaluation == pytest.approx(9 * 50_000 / (8 * 2000 * 0.5))
    assert (found.scoring, found.first_steps) == (90, 30)
    assert found.seconds == pytest.approx(found.training + found.evaluation + 120)
    text = "\n".join(estimate_lines(found, given))
    for word in ("ESTIMATE", "35.15 epochs, the reference's mean of 15 runs", "50% are left", "training waits for it"):
        assert word in text
    assert "https://github.com/mlcommons/training_results_v4.0" in text
    bert = estimate("bert", Assumptions(8, 56, 300.0, 1.0))
    assert (bert.epochs, bert.evaluations) == (2_621_696, 18)


def test_more_gpus_are_quicker_until_the_batch_needs_more_epochs() -> None:
    seconds = [estimate("ssd", Assumptions(gpus, 32, 300.0, 1.0)).training for gpus in (1, 2, 8, 16, 128)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[3] > seconds[2] / 2, "five epochs instead of four"


def test_fasttrain_plan_time(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("subject,case,variant,metric,value\nretinanet,b32,full,images_per_second,340.5\n")
    call = ["plan", "time", "retinanet", "--gpus=1", "--batch=32"]
    done = CliRunner().invoke(app, [*call, f"--rows={rows}", "--case=b32", "--variant=full"])
    assert done.exit_code == 0
    for line in ("ssd on 1 GPU, global batch 32", "340.5 samples/s a GPU, of which 100% are left", "its smallest"):
        assert line in done.output
    assert isinstance(CliRunner().invoke(app, call).exception, ConfigError)
    with pytest.raises(ConfigError, match="no rate of case 'b16', variant 'full'; it has: b32/full"):
        rate_from_rows(rows, "b16", "full")
    with pytest.raises(DataError, match="can't be read as result rows"):
        rate_from_rows(tmp_path / "none.csv", "", "")
    unknown = CliRunner().invoke(app, ["plan", "time", "resnt", "--gpus=1", "--batch=32", "--rate=1"])
    assert "benchmarks: ssd, resnet, bert" in str(unknown.exception)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [({"gpus": 0}, "gpus is 0"), ({"rate": -1.0}, "rate is -1"), ({"efficiency": 1.5}, "efficiency is 1.5"),
     ({"epochs": 0.0}, "epochs is 0"), ({"scoring_seconds": -1.0}, "0 seconds or more")],
)  # fmt: skip
def test_assumptions_that_make_no_sense(wrong: dict[str, float], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Assumptions(**{"gpus": 1, "batch": 1, "rate": 1.0, "efficiency": 1.0, **wrong})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the work of 'sssd' is not known here; did you mean 'ssd'"):
        estimate("sssd", Assumptions(1, 1, 1.0, 1.0))
