import io
import json
import math
import random
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image, ImageDraw
from rich.console import Console

from fasttrain.errors import ConfigError
from fasttrain.report import (
    benchmark_tables,
    comparison_table,
    format_duration,
    headline,
    outcome_tables,
    print_report,
    run_labels,
    seed_tables,
)
from fasttrain.report_page import write_page
from fasttrain.run_summary import Reached, load_run

CONFIG: dict[str, Any] = {
    "recipe": "retinanet",
    "seed": 1,
    "module": {"class": "fasttrain.recipes.retinanet.module.RetinaNetTraining", "learning_rate": 0.002},
    "data": {"class": "fasttrain.recipes.retinanet.data.DetectionData", "image_size": [96, 96], "seed": 1},
    "target": {"metric": "map", "value": 0.4, "mode": "max", "stop": True},
    "optimizations": {"channels_last": {}, "precision": {"kind": "bf16"}, "cuda_graph": None},
}
ENVIRONMENT = {
    "gpu": None,
    "cpu": "Intel Xeon Platinum 8480C",
    "cores": 2,
    "memory_gib": 7.8,
    "os": "Linux 6.1",
    "python": "3.11.7",
    "versions": {"torch": "2.14.1", "lightning": "2.6.6"},
    "commit": "1f0c2d9a77b1",
}
PLAN = {
    "optimizations": [
        {
            "name": "channels_last",
            "verdict": "applies",
            "reason": "",
            "stage": "model",
            "grade": "same numbers",
            "changes": [
                {"path": "backbone.body", "what": "convolution weights to channels_last", "count": 24},
                {"path": "images", "what": "inputs to channels_last", "count": 1},
            ],
        },
        {
            "name": "precision",
            "verdict": "refused",
            "reason": "bf16 asked for, but this CPU has no bf16 instructions: it would run 9 times slower.",
            "stage": "plugins",
            "grade": "same quality",
            "changes": [],
        },
        {"name": "cuda_graph", "verdict": "off", "reason": "not asked for", "stage": "callbacks", "grade": "",
         "changes": []},
    ]
}  # fmt: skip


OUTCOME: dict[str, Any] = {
    "optimizations": [
        {
            "name": "cuda_graph",
            "tables": [
                {
                    "title": "graphs by input signature",
                    "columns": ["input signature", "hits", "captures", "step_ms", "last use"],
                    "rows": [
                        ["<i>images</i> float32[16, 3, 800, 800] [red]", 12480, 2, 61.2345, "step 9"],
                        ["images float32[16, 3, 640, 640]", 7, 1, None, "—"],
                    ],
                    "note": "2 of 2 <graphs> stayed.",
                },
                {"title": "none evicted", "columns": ["input signature", "evictions"], "rows": [], "note": ""},
            ],
            "error": None,
        }
    ]
}


def write_run(folder: Path, *, seed: int = 1, status: str = "reached_target", quality: float = 0.4123,
              reached_seconds: float | None = 132.4, **result: Any) -> Path:  # fmt: skip
    """Write a run folder as `fasttrain fit` leaves it: a detector's curves, eleven scorings, two sample pictures."""
    (folder / "samples").mkdir(parents=True)
    noise = random.Random(seed)
    rows = ["step,epoch,seconds,name,value"]
    for step in range(10, 1321, 10):
        seconds, decay = 4 + step / 10, math.exp(-step / 300)
        classes, boxes = (0.25 + 0.9 * decay) * noise.gauss(1, 0.08), (0.2 + 0.35 * decay) * noise.gauss(1, 0.06)
        values = {"train_loss": classes + boxes, "cls_loss": classes, "box_loss": boxes, "lr": 2e-3 * decay,
                  "samples_per_second": 168 * noise.gauss(1, 0.03) - (40 if step < 40 else 0)}  # fmt: skip
        if step % 120 == 0:
            share = 1 - math.exp(-step / 420)
            values |= {"map": quality * share / (1 - math.exp(-1320 / 420)), "map_50": 0.68 * share}
        rows += [f"{step},{step // 120},{seconds:.3f},{name},{value:.6g}" for name, value in values.items()]
    (folder / "metrics.csv").write_text("\r\n".join(rows) + "\r\n", newline="")
    found: dict[str, Any] = {
        "recipe": "retinanet",
        "status": status,
        "quality": {"name": "map", "value": quality, "best": quality},
        "target": {"name": "map", "value": 0.4, "mode": "max"},
        "reached": reached_seconds is not None,
        "reached_at": {"step": 1320, "epoch": 11, "seconds": reached_seconds, "samples": 21120}
        if reached_seconds is not None else None,
        "samples": 21120,
        "steps": 1320,
        "epochs": 11,
        "seconds": 140.0,
        "samples_per_second": 161.0,
        "breakdown_seconds": {"data_wait": 3.1, "host_to_device": 0.4, "step": 118.2, "evaluation": 9.8,
                              "checkpoint": 2.2, "start_up": 4.6, "other": 1.7},
        "bad_samples": {"skipped": 0},
        "error": None,
        "seed": seed,
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(found | result))
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT))
    (folder / "plan.json").write_text(json.dumps(PLAN))
    config = CONFIG | {"seed": seed, "data": CONFIG["data"] | {"seed": seed}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    for index in range(2):
        picture = Image.new("RGB", (96, 96), (40, 60 + 80 * index, 90))
        ImageDraw.Draw(picture).rectangle((20, 20, 70, 60), outline=(255, 200, 0))
        picture.save(folder / "samples" / f"{index}.png")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page on two seeds that hold what looks like HTML and like console markup."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        write_run(folder / "one", recipe="<b>"),
        write_run(folder / "two", recipe="<b>", seed=2, quality=0.4067, error="<script>alert(1)</script> [red]"),
    ]
    write_page([load_run(path) for path in runs], folder / "new" / "report.html")
    assert sorted(path.name for path in (folder / "new").iterdir()) == ["report.html"]
    return (folder / "new" / "report.html").read_text(encoding="utf-8")


def test_a_whole_run_is_read_without_problems(run: Path) -> None:
    summary = load_run(run)
    assert summary.problems == ()
    assert (summary.recipe, summary.status, summary.seed) == ("retinanet", "reached_target", 1)
    assert summary.reached == Reached(132.4, 1320, 11, 21120)
    assert summary.curves["map"].steps == tuple(range(120, 1321, 120))
    assert summary.curves["map"].values[-1] == pytest.approx(0.4123)
    assert summary.optimizations is not None
    assert summary.optimizations[0].changes == (
        "backbone.body: convolution weights to channels_last (24 times)",
        "images: inputs to channels_last",
    )
    assert [path.name for path in summary.pictures] == ["0.png", "1.png"]


def test_many_changes_of_one_kind_are_one_sentence(run: Path) -> None:
    changes = [{"path": f"layer{index}.weight", "what": "channels_last", "count": 1} for index in range(1200)]
    changes.append({"path": "head", "what": "fused", "count": 5})
    (run / "plan.json").write_text(json.dumps({"optimizations": [{"name": "x", "changes": changes}]}))
    (line,) = load_run(run).optimizations or ()
    assert line.changes == (
        "channels_last in 1,200 places, from layer0.weight to layer1199.weight",
        "head: fused (5 times)",
    )


def test_what_an_optimization_told_is_a_table(run: Path) -> None:
    (run / "optimizations.json").write_text(json.dumps(OUTCOME))
    summary = load_run(run)
    assert summary.problems == ()
    table, empty = outcome_tables(summary)
    assert table.title == "cuda_graph: graphs by input signature"
    assert table.columns == ("input signature", "hits", "captures", "step_ms", "last use")
    assert table.align == "lrrrl", "numbers to the right, one that is unknown too"
    assert table.rows[0] == ("<i>images</i> float32[16, 3, 800, 800] [red]", "12,480", "2", "61.2", "step 9")
    assert table.rows[1][3] == "—"
    assert table.note == "2 of 2 <graphs> stayed."
    assert (empty.title, empty.rows) == ("cuda_graph: none evicted", ())


def test_what_an_optimization_told_stands_under_the_plan(run: Path, tmp_path: Path) -> None:
    write_page([load_run(run)], tmp_path / "without.html")
    console = Console(width=120, record=True, file=io.StringIO())
    print_report([load_run(run)], console)
    without = console.export_text()
    (run / "optimizations.json").write_text(json.dumps(OUTCOME))
    print_report([load_run(run)], console)
    text = console.export_text()
    assert text.startswith(without), "below all that was there before"
    cells = ("<i>images</i> float32[16, 3, 800, 800] [red]", "12,480", "2", "61.2", "step 9")
    assert any(tuple(filter(None, map(str.strip, line.split("  ")))) == cells for line in text.splitlines()), text
    write_page([load_run(run)], tmp_path / "with.html")
    plain, page = (Page.of(tmp_path / f"{name}.html") for name in ("without", "with"))
    assert "i" not in page.tags[-60:], "what looks like HTML in a cell stays text"
    assert (plain.tags.count("table"), page.tags.count("table")) == (2, 4)
    order = [page.text.index(words) for words in ("this CPU has no bf16", "graphs by input signature", "All numbers")]
    assert order == sorted(order)
    assert "2 of 2 <graphs> stayed." in page.text


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"optimizations": [{"na',
         "optimizations.json is cut short or damaged (at line 1): what the optimizations told of the run is unknown."),
        ("[1]", "optimizations.json holds no keys and values: what the optimizations told of the run is unknown."),
        ('{"optimizations": 3}',
         "optimizations.json holds no tables: what the optimizations told of the run is unknown."),
        ('{"tables": []}', "optimizations.json holds no tables: what the optimizations told of the run is unknown."),
        ('{"optimizations": [{"name": "x", "tables": [], "error": "KeyError: 3"}]}',
         "x failed to tell what it did over the run: KeyError: 3"),
        ('{"optimizations": [7, {"tables": 3}]}', None),
    ],
)  # fmt: skip
def test_damaged_tables_are_a_problem_and_no_crash(run: Path, content: str, problem: str | None) -> None:
    (run / "optimizations.json").write_text(content)
    summary = load_run(run)
    assert summary.problems == ((problem,) if problem else ())
    assert summary.outcome_tables == ()
    print_report([summary], Console(quiet=True))


@pytest.mark.parametrize(
    "damage",
    [
        7,
        {"columns": 3},
        {"columns": ["a", 3]},
        {"rows": None},
        {"rows": [["8x3", 1, 2]]},
        {"rows": [["8x3", 1], "xy"]},
        {"rows": [["8x3", [1]]]},
        {"rows": [["8x3", True]]},
    ],
)
def test_a_damaged_table_is_left_out_and_the_others_shown(run: Path, damage: Any) -> None:
    good = {"title": "good", "columns": ["input", "hits"], "rows": [["8x3", 1]], "note": ""}
    bad = good | damage if isinstance(damage, dict) else damage
    told = {"optimizations": [{"tables": [bad, good]}, {"name": "x", "tables": [good]}]}
    (run / "optimizations.json").write_text(json.dumps(told))
    summary = load_run(run)
    assert summary.problems == ("optimizations.json: tables that are damaged and left out: 1.",)
    titles = [table.title for table in outcome_tables(summary)]
    assert titles == ["an optimization without a name: good", "x: good"]
    print_report([summary], Console(quiet=True))


def test_reading_and_tables_load_neither_torch_nor_lightning() -> None:
    modules = "sys, fasttrain.report, fasttrain.report_page, fasttrain.mlperf.tables"
    code = f"import {modules}; print({{'torch', 'lightning'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_path_without_a_run_is_refused_in_one_sentence(tmp_path: Path) -> None:
    files = "config.yaml, environment.json, plan.json, metrics.csv, result.json"
    with pytest.raises(ConfigError) as caught:
        load_run(tmp_path / "nowhere")
    assert str(caught.value) == (
        f"'{tmp_path}/nowhere' does not exist; a run folder is written by `fasttrain fit` and holds {files}."
    )
    with pytest.raises(ConfigError) as caught:
        load_run(tmp_path)
    assert str(caught.value) == f"'{tmp_path}' is no run folder: it holds none of {files}."
    result = write_run(tmp_path / "retinanet" / "run") / "result.json"
    with pytest.raises(ConfigError) as caught:
        load_run(tmp_path)
    assert str(caught.value).endswith(f"it holds none of {files}. Run folders inside it: retinanet/run.")
    with pytest.raises(ConfigError) as caught:
        load_run(result)
    assert str(caught.value) == f"'{result}' is a file, not a run folder; give the folder that holds {files}."


def test_each_missing_file_is_said_and_the_rest_still_shown(run: Path, tmp_path: Path) -> None:
    for name in ("environment.json", "plan.json", "metrics.csv", "config.yaml"):
        (run / name).unlink()
    summary = load_run(run)
    assert summary.problems == (
        "plan.json is missing: which optimizations were on is unknown.",
        "environment.json is missing: the machine and the versions are unknown.",
        "config.yaml is missing: its settings are unknown, and it can't be grouped with runs that differ by seed.",
        "metrics.csv is missing: there are no curves to draw.",
    )
    write_page([summary], tmp_path / "page.html")
    assert comparison_table([summary]).rows[0][-1] == "—"
    assert "metrics.csv is missing: there are no curves to draw." in Page.of(tmp_path / "page.html").text


def test_a_crashed_run_shows_what_its_metrics_hold(run: Path) -> None:
    (run / "result.json").write_text('{"recipe": "retinanet", "sta')
    with (run / "metrics.csv").open("a") as file:
        file.write("1330,11,137.0,train_loss,nan\n1340,,138.0,lr\n1350,11,139.0,map,0.4")
    summary = load_run(run)
    assert summary.problems == (
        "result.json is cut short or damaged (at line 1): the run crashed or is still going, and its totals are read "
        "off metrics.csv as far as that goes.",
        "metrics.csv: lines that are cut short or damaged and left out: 2.",
        "train_loss is not a finite number from step 1330 on.",
    )
    assert (summary.status, summary.recipe, summary.steps, summary.seconds) == ("unknown", "retinanet", 1330, 137.0)
    assert summary.quality is not None
    assert summary.quality.value == pytest.approx(0.4123)
    assert headline(summary) == "No result was written; last seen after 2 min 17 s with map 0.4123."
    assert comparison_table([summary]).rows[0][3:6] == ("—", "168", "no result")


def test_empty_and_odd_files_are_survived(run: Path) -> None:
    (run / "metrics.csv").write_text("")
    (run / "plan.json").write_text('{"optimizations": [7, {"name": "x", "changes": 3}]}')
    (run / "environment.json").write_text("[]")
    (run / "result.json").write_text(
        '{"quality": "good", "seconds": NaN, "breakdown_seconds": {"step": 0}, "reached_at": 1}'
    )
    summary = load_run(run)
    assert "metrics.csv holds no values: there are no curves to draw." in summary.problems
    assert "environment.json holds no keys and values: the machine and the versions are unknown." in summary.problems
    assert (summary.quality, summary.seconds, summary.reached) == (None, None, None)
    print_report([summary], Console(quiet=True))


def test_of_a_step_run_again_after_a_resume_the_last_value_counts(run: Path) -> None:
    (run / "metrics.csv").write_text(
        "step,epoch,seconds,name,value\n1,0,1.0,map,0.1\n2,0,2.0,map,0.2\n3,0,3.0,map,0.3\n2,0,9.0,map,0.25\n"
    )
    curve = load_run(run).curves["map"]
    assert (curve.steps, curve.seconds, curve.values) == ((1, 2, 3), (1.0, 9.0, 3.0), (0.1, 0.25, 0.3))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "Reached map ≥ 0.4 after 2 min 12 s (epoch 11, step 1,320)."),
        (
            {"reached_seconds": None, "status": "finished", "quality": 0.3},
            "Finished after 2 min 20 s with map 0.3000, short of map ≥ 0.4.",
        ),
        (
            {"reached_seconds": None, "status": "interrupted", "target": {"name": "map", "value": 0.4, "mode": "min"}},
            "Interrupted after 2 min 20 s with map 0.4123, short of map ≤ 0.4.",
        ),
    ],
)
def test_the_headline_says_how_it_ended(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    assert headline(load_run(write_run(tmp_path / "run", **changes))) == sentence


def test_the_headline_of_a_run_that_failed_before_its_first_score(run: Path) -> None:
    (run / "result.json").write_text(
        '{"status": "failed", "seconds": 0.2, "reached": false, "quality": {"name": "map", "value": null}, '
        '"target": {"name": "map", "value": 0.4, "mode": "max"}}'
    )
    assert headline(load_run(run)) == "Failed after 200 ms with no score, short of map ≥ 0.4."


def test_durations_read_as_people_say_them() -> None:
    seconds = (None, 0, 0.85, 43.2, 59.97, 125, 3599.6, 3840, 90061)
    texts = ["—", "0 s", "850 ms", "43.2 s", "1 min 00 s", "2 min 05 s", "1 h 00 min", "1 h 04 min", "25 h 01 min"]
    assert [format_duration(value) for value in seconds] == texts


def test_comparison_shows_what_differs_and_notes_what_does_not(tmp_path: Path) -> None:
    runs = [load_run(write_run(tmp_path / "one")), load_run(write_run(tmp_path / "two", seed=2, reached_seconds=None))]
    table = comparison_table(runs)
    assert table.columns == ("run", "seed", "quality", "time to target", "samples/s", "status")
    assert table.rows == (
        ("one", "1", "map 0.4123", "2 min 12 s", "161", "reached target"),
        ("two", "2", "map 0.4123", "not reached", "161", "reached target"),
    )
    assert table.note == (
        "The same for all: recipe retinanet, target map ≥ 0.4, hardware Intel Xeon Platinum 8480C, on channels_last."
    )


def test_runs_of_one_folder_name_are_told_apart(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run")]
    assert run_labels([load_run(path) for path in paths]) == ["a/run", "b/run"]
    assert run_labels([load_run(paths[0])] * 2) == ["run", "run"]


def test_seeds_are_aggregated_over_the_runs_that_ended(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / "1", seed=1, quality=0.41, reached_seconds=100.0),
        write_run(tmp_path / "2", seed=2, quality=0.44, reached_seconds=140.0, samples_per_second=173.0),
        write_run(tmp_path / "3", seed=3, quality=0.38, reached_seconds=None, status="finished"),
        write_run(tmp_path / "4", seed=4, quality=0.01, reached_seconds=None, status="failed"),
        write_run(tmp_path / "other", seed=5),
    ]
    config = yaml.safe_load((paths[-1] / "config.yaml").read_text())
    config["module"]["learning_rate"] = 0.1
    (paths[-1] / "config.yaml").write_text(yaml.safe_dump(config))
    (table,) = seed_tables([load_run(path) for path in paths])
    assert table.title == "retinanet on Intel Xeon Platinum 8480C, seeds 1, 2, 3, 4"
    assert table.rows == (
        ("map, last", "0.4100", "0.3800", "0.4400", "3"),
        ("map, best", "0.4100", "0.3800", "0.4400", "3"),
        ("time to target", "2 min 00 s", "1 min 40 s", "2 min 20 s", "2"),
        ("samples/s", "165", "161", "173", "3"),
        ("whole run", "2 min 20 s", "2 min 20 s", "2 min 20 s", "3"),
    )
    assert table.note == "1 of 4 runs did not end and are left out. 2 of 3 reached map ≥ 0.4."


def result_row(**changes: Any) -> dict[str, Any]:
    return {"subject": "focal_loss", "case": "mlperf_b16", "variant": "plain", "metric": "step", "value": "3.0",
            "unit": "ms", "p10": "2.9", "p90": "3.2", "repeats": "20", "gpu": "H200", "cpu": "Xeon", "torch": "2.11.0",
            "cudnn": "91900", "date": "2026-11-30", "commit": "abc", "note": ""} | changes  # fmt: skip


def test_benchmarks_stand_side_by_side_with_speed_up_against_plain() -> None:
    rows = [
        result_row(variant="ours", value="1.5", p10="1.4", p90="1.6"),
        result_row(variant="ours", value="2.0", p10="1.9", p90="2.1"),
        result_row(),
        result_row(metric="throughput", unit="images/s", value=100.0, p10="", p90=""),
        result_row(metric="throughput", unit="images/s", value=150.0, p10="", p90="", variant="ours"),
        result_row(metric="map", unit="", value="0.41", p10="", p90=""),
        result_row(metric="map", unit="", value="0.42", p10="", p90="", variant="ours"),
        result_row(case="small", variant="ours", p10="", p90=""),
    ]
    (table,) = benchmark_tables(rows)
    assert table.title == "focal_loss"
    assert table.columns == ("case", "metric", "unit", "plain", "ours")
    assert table.rows == (
        ("mlperf_b16", "step", "ms", "3\n2.9 to 3.2", "2  1.50x\n1.9 to 2.1"),
        ("mlperf_b16", "throughput", "images/s", "100", "150  1.50x"),
        ("mlperf_b16", "map", "", "0.41", "0.42"),
        ("small", "step", "ms", "—", "3"),
    )
    machine, _, rest = table.note.partition(" · commit abc · ")
    assert machine == "H200 · torch 2.11.0 · cuDNN 91900"
    assert rest == "2026-11-30 · repeats 20 · rows measured again and not shown: 1"


def test_benchmarks_of_two_machines_are_never_compared() -> None:
    tables = benchmark_tables([result_row(), result_row(variant="ours", gpu="", value="1.5")])
    assert [table.columns[3:] for table in tables] == [("ours",), ("plain",)]
    assert tables[0].rows[0][3] == "1.5\n2.9 to 3.2"
    assert tables[0].note.startswith("Xeon")


def test_the_console_shows_markup_as_text_and_every_reason(tmp_path: Path) -> None:
    runs = [load_run(write_run(tmp_path / str(seed), seed=seed, recipe="[red]net[/]")) for seed in (1, 2)]
    console = Console(width=100, record=True, file=io.StringIO())
    print_report(runs, console)
    text = console.export_text()
    assert "[red]net[/] · 1" in text
    assert "this CPU has no bf16" in text
    assert "seeds 1, 2" in text
    assert "84.4%" in text


class Page(HTMLParser):
    """What a browser would make of the page: its open tags, the addresses it would load, and its text."""

    VOID = frozenset({"meta", "img", "source", "br", "link", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.text = ""

    @classmethod
    def of(cls, source: str | Path) -> "Page":
        made = cls()
        made.feed(source if isinstance(source, str) else source.read_text(encoding="utf-8"))
        made.close()
        return made

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "srcset", "href", "data", "action", "poster"):
                self.loads.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_well_formed_and_loads_nothing(page: str) -> None:
    parsed = Page.of(page)
    assert parsed.open == []
    assert len(set(parsed.ids)) == len(parsed.ids) == 2
    assert {address.partition(",")[0] for address in parsed.loads if not address.startswith("#")} == {
        "data:image/svg+xml;base64",
        "data:image/png;base64",
    }
    assert {address[1:] for address in parsed.loads if address.startswith("#")} == set(parsed.ids)
    assert "http://" not in page
    assert "https://" not in page
    assert "url(" not in page
    assert "script" not in parsed.tags


def test_the_page_escapes_what_looks_like_html(page: str) -> None:
    parsed = Page.of(page)
    assert "b" not in parsed.tags
    assert "&lt;b&gt;" in page
    assert "<script>alert(1)</script> [red]" in parsed.text


def test_the_page_holds_every_part(page: str) -> None:
    parsed = Page.of(page)
    for words in ("Reached map ≥ 0.4 after 2 min 12 s", "Where the time went", "84.4 %", "Sample predictions",
                  "refused", "this CPU has no bf16", "versions.torch", "Intel Xeon", "learning_rate: 0.002",
                  "<b> on Intel Xeon Platinum 8480C, seeds 1, 2"):  # fmt: skip
        assert words in parsed.text
    assert parsed.tags.count("img") == 1 + 2 * (3 + 2)


def test_a_damaged_picture_is_left_out_and_said(run: Path, tmp_path: Path) -> None:
    (run / "samples" / "1.png").write_bytes(b"")
    (run / "metrics.csv").unlink()
    write_page([load_run(run)], tmp_path / "page.html")
    parsed = Page.of(tmp_path / "page.html")
    assert parsed.tags.count("img") == 3 + 1
    assert "samples/1.png is no PNG image and left out." in parsed.text


def test_a_page_that_cannot_be_written_is_refused_and_leaves_nothing(run: Path, tmp_path: Path) -> None:
    (run / "metrics.csv").unlink()
    with pytest.raises(ConfigError) as caught:
        write_page([load_run(run)], tmp_path)
    assert (
        str(caught.value) == f"The report can't be written to '{tmp_path}' (Is a directory); name a file that can be."
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert not list(tmp_path.parent.glob(".*.partial"))
