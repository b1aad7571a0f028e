"""Timing, and the rows in which measurements are kept."""

import csv
import random
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fasttrain.bench import Case, choose_cases, find_cases, run_cases, split_options, with_options
from fasttrain.environment import Hardware, describe, source_commit, usable_cores
from fasttrain.errors import ConfigError, DataError
from fasttrain.measure import Row, StepProbe, make_row, read_rows, summarize, time_ms, write_rows
from fasttrain.randomness import random_state, set_random_state

DESIGN = "subject,case,variant,metric,value,unit,p10,p90,repeats,gpu,cpu,torch,cudnn,date,commit,note"


def test_summarize() -> None:
    assert summarize([3.0, 1.0, 2.0]) == (2.0, 1.2, 2.8, 3)
    assert summarize([5.0]) == (5.0, 5.0, 5.0, 1)
    assert summarize(range(11)) == (5, 1.0, 9.0, 11)


def test_the_row_is_the_designs() -> None:
    assert ",".join(field.name for field in fields(Row)) == DESIGN


def test_a_row_knows_where_and_when_it_was_measured() -> None:
    row = make_row("room", "case", "ours", "step_ms", "ms", [2.0, 1.0, 3.0], note="a, b")
    assert (row.value, row.p10, row.p90, row.repeats) == (2.0, 1.2, 2.8, 3)
    assert row.torch == torch.__version__
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", row.date)
    assert f"{usable_cores()} cores" in row.cpu
    assert row.commit == source_commit()
    assert bool(row.gpu) == torch.cuda.is_available()


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.csv"
    one = make_row("room", "case", "ours", "step_ms", "ms", [1.5, 2.5], note='quoted "x", with comma\nand a line')
    two = make_row("room", "case", "plain", "step_ms", "ms", [3.0])
    write_rows(path, [])
    write_rows(path, [one])
    write_rows(path, [two])
    assert path.read_text().splitlines()[0] == DESIGN
    assert read_rows(path) == [one, two]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"value": "fast"}, "{path}, line 2: could not convert string to float: 'fast'."),
        ({"repeats": "3.5"}, "{path}, line 2: invalid literal for int() with base 10: '3.5'."),
    ],
)
def test_a_damaged_row(tmp_path: Path, change: dict[str, str], sentence: str) -> None:
    path = tmp_path / "rows.csv"
    row = {**asdict(make_row("a", "b", "c", "d", "ms", [1.0])), **change}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerow(row)
    with pytest.raises(DataError) as caught:
        read_rows(path)
    assert str(caught.value) == sentence.format(path=path)


def test_a_short_row_and_a_missing_column(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"{DESIGN}\na,b\n")
    with pytest.raises(DataError, match=r"rows\.csv, line 2: the row is shorter than the header\.$"):
        read_rows(path)
    path.write_text(DESIGN.replace("p90,", "") + "\n")
    with pytest.raises(DataError, match=r"^.*rows\.csv has no column 'p90'; result rows have subject, case, "):
        read_rows(path)
    path.write_text("")
    with pytest.raises(DataError, match="has no column 'subject'"):
        read_rows(path)


def test_rows_that_cant_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"^the rows can't be written to .*rows\.csv \(.+\); name another file\.$"):
        write_rows(tmp_path / "file" / "rows.csv", [])


def test_time_ms_counts_each_call() -> None:
    calls = []

    def call() -> None:
        calls.append(1)
        time.sleep(0.002)

    timing = time_ms(call, "cpu", warmup=2, repeats=5)
    assert len(calls) == 7
    assert timing.repeats == 5
    assert 2.0 <= timing.p10_ms <= timing.median_ms <= timing.p90_ms


class Module(pl.LightningModule):
    """Draws from all generators, has state, logs, and changes its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.steps = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        self.steps += 1
        random.random()
        np.random.rand()
        batch["x"].mul_(2)
        loss = self.net(batch["x"]).square().mean()
        self.log("loss", loss)
        return {"loss": loss}


def test_a_probe_leaves_everything_as_it_was() -> None:
    module = Module()
    module.net[1].eval()  # a frozen part, which a fit does not put into training mode either
    batch = {"x": torch.ones(3, 4)}
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    state = random_state()
    seen = []

    def prepare(copied: pl.LightningModule, copied_batch: Any) -> Any:
        seen.append(copied)
        assert [part.training for part in copied.net] == [True, False, True]
        assert torch.equal(copied_batch["x"], torch.ones(3, 4)), "each variant begins with the batch as it was"
        return copied_batch

    probe = StepProbe(module, batch, "cpu")
    for _ in range(2):
        timing = probe(prepare, warmup=1, repeats=2)
    assert timing.repeats == 2
    assert seen[0] is not seen[1] is not module
    assert seen[0].steps == 3
    assert module.steps == 0
    assert [part.training for part in module.net] == [True, False, True]
    assert all(parameter.grad is None for parameter in module.parameters())
    for name, value in module.state_dict().items():
        assert torch.equal(value, weights[name])
    assert torch.equal(batch["x"], torch.ones(3, 4))
    after = random_state()
    assert torch.equal(after["torch"], state["torch"])
    assert torch.equal(after["python"][1], state["python"][1])
    assert torch.equal(after["numpy"]["key"], state["numpy"]["key"])
    assert after["numpy"]["pos"] == state["numpy"]["pos"]


def test_a_step_without_batch_idx() -> None:
    class Short(Module):
        def training_step(self, batch: Any) -> Any:  # type: ignore[override]
            return super().training_step(batch, 0)

    assert StepProbe(Short(), {"x": torch.ones(3, 4)}, "cpu")(repeats=1).repeats == 1


def test_autocast_reaches_the_step() -> None:
    dtypes = []

    class Notes(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 4)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            out = self.net(batch)
            dtypes.append(out.dtype)
            return out.float().sum()

    probe = StepProbe(Notes(), torch.ones(2, 4), "cpu")
    probe(warmup=0, repeats=1)
    probe(autocast=torch.bfloat16, warmup=0, repeats=1)
    assert dtypes == [torch.float32, torch.bfloat16]


def test_random_state_is_put_back() -> None:
    state = random_state()
    drawn = (random.random(), random.gauss(0, 1), np.random.randn(), torch.rand(2).tolist())
    set_random_state(state)
    assert (random.random(), random.gauss(0, 1), np.random.randn(), torch.rand(2).tolist()) == drawn


def test_what_is_recorded_of_a_machine() -> None:
    record = describe()
    assert torch.__version__.startswith(record["versions"]["torch"])
    assert record["cores"] >= 1
    assert (record["gpu"] is None) == (not torch.cuda.is_available())


def test_the_part_of_the_machine_that_a_run_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Hardware.of_accelerator("cpu") == Hardware.cpu()
    assert Hardware.of_accelerator("auto") == Hardware.here()
    gpu = Hardware("gpu", "cuda:0", "a GPU", 16, (9, 0), 2**30)
    monkeypatch.setattr(Hardware, "here", classmethod(lambda cls: gpu))
    assert Hardware.of_accelerator("cpu").device == "cpu", "a run on the CPU of a machine with a GPU"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(ConfigError) as caught:
        Hardware.of_accelerator("gpu")
    assert str(caught.value) == (
        f"trainer.accelerator=gpu, but torch sees no GPU here ({usable_cores()} CPU cores); hardware=cpu trains "
        "without one."
    )
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert Hardware.of_accelerator("gpu") == gpu
    assert gpu.sentence == "a GPU, 1 GiB"


def a_case(name: str, needs_gpu: bool = False) -> Case:
    row = make_row("room", name, "ours", "step_ms", "ms", [1.0])
    return Case("room", name, "for tests", lambda: [row], needs_gpu)


def test_bench_cases_are_found_beside_the_code_they_measure() -> None:
    assert {case.subject for case in find_cases(["fasttrain.callbacks.channels_last"])} == {"channels_last"}
    assert find_cases(["fasttrain.recipes.no_package_only_yaml"]) == [], "a recipe may be a YAML file alone"
    assert find_cases(["fasttrain.callbacks"]) == []


def test_choosing_and_running_bench_cases() -> None:
    cases = [a_case("small"), a_case("large", needs_gpu=True)]
    assert choose_cases(cases, []) == choose_cases(cases, ["room"]) == cases
    assert choose_cases(cases, ["room/large", "room"]) == [cases[1], cases[0]]
    with pytest.raises(ConfigError, match=r"^there is no bench case 'room/smal'; did you mean 'room/small'\?$"):
        choose_cases(cases, ["room/smal"])
    ran = list(run_cases(cases, on_gpu=False))
    assert [(case.name, None if row is None else row.case) for case, row in ran] == [
        ("small", "small"),
        ("large", None),
    ]
    assert all(row for _, row in run_cases(cases, on_gpu=True))


def test_options_of_bench_cases() -> None:
    asked = []

    def run(fixed: int, *, images: int = 100, scorers: str = "all", limit: float = 1.5) -> list[Row]:
        asked.append((fixed, images, scorers, limit))
        return []

    case = Case("room", "case", "", partial(run, 7))
    words = ["room/case", "images=20", "scorers=a=b", "limit=3"]
    wanted, options = split_options(words)
    assert (wanted, options) == (["room/case"], {"images": "20", "scorers": "a=b", "limit": "3"})
    assert case.options == {"images": 100, "scorers": "all", "limit": 1.5}
    list(run_cases([case, *with_options([case], options)], on_gpu=False))
    assert asked == [(7, 100, "all", 1.5), (7, 20, "a=b", 3.0)]
    with pytest.raises(ConfigError, match=r"^bench case room/case has no option 'image'; did you mean 'images'\?$"):
        with_options([case], {"image": "3"})
    with pytest.raises(ConfigError, match=r"^bench option images=many is no int; the usual value is 100\.$"):
        with_options([case], {"images": "many"})
    with pytest.raises(ConfigError, match=r"^bench case room/small has no option 'images'; it has none$"):
        with_options([a_case("small")], {"images": "3"})


def test_a_row_comes_when_it_is_measured() -> None:
    measured = []

    def run() -> Iterator[Row]:
        for variant in ("plain", "ours"):
            measured.append(variant)
            yield make_row("room", "case", variant, "ms", "ms", [1.0])

    for (_, row), count in zip(run_cases([Case("room", "case", "", run)], on_gpu=False), (1, 2), strict=True):
        assert row is not None
        assert measured == ["plain", "ours"][:count]
