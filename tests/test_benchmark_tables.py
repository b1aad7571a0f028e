"""Measured tables are what the rows say, and nothing is shown that was not measured."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from fasttrain.measure import Row, write_rows

ROOT = Path(__file__).parent.parent
ROW = Row(
    "thing", "b16", "ours", "ms", 0.5, "ms", 0.45, 0.52, 30, "NVIDIA X", "Some CPU, 16 cores, Python 3.12",
    "2.11.0", "91900", "2026-11-30", "abc1234",
)  # fmt: skip
BLOCK = """before
<!-- rows thing ms; b16 = batch 16, b32; eager = plain PyTorch, ours, floor -->
<!-- end of rows -->
after
"""


@pytest.fixture
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_documents_hold_what_their_rows_say(tables: ModuleType) -> None:
    outdated = [path for path in tables.documents() if tables.with_tables(path.read_text()) != path.read_text()]
    assert not outdated, "run python benchmarks/tables.py"
    assert sum("<!-- rows" in path.read_text() for path in tables.documents()) > 5


def test_a_table_of_rows(tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    rows = [
        replace(ROW, variant="eager", value=1.25, p10=1.2, p90=1.3),
        ROW,
        replace(ROW, variant="floor", value=0.4, p10=0.4, p90=0.4, repeats=1),
        replace(ROW, metric="rate", value=9.0),
    ]
    write_rows(tmp_path / "benchmarks" / "results" / "thing.csv", rows)
    text = tables.with_tables(BLOCK)
    lines = text.splitlines()
    assert lines[2:6] == [
        "| ms | plain PyTorch | ours | floor |",
        "|---|---|---|---|",
        "| batch 16 | 1.25 | **0.5** | 0.4 |",
        "| b32 | not measured | not measured | not measured |",
    ]
    assert lines[7] == (
        "Medians of 30; 10th and 90th percentiles within 10% of them. NVIDIA X, 16 cores, torch 2.11.0, cuDNN 9.19, "
        "2026-11-30, commit abc1234."
    )
    assert (lines[0], lines[-1]) == ("before", "after")
    assert tables.with_tables(text) == text, "a second time changes nothing"


def test_a_rate_is_best_where_it_is_highest(
    tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    rate = replace(ROW, unit="images/s")
    rows = [
        rate,
        replace(rate, variant="eager", value=0.25, p10=0.25, p90=0.25),
        replace(rate, variant="floor", value=9),
    ]
    write_rows(tmp_path / "benchmarks" / "results" / "thing.csv", rows)
    assert "| batch 16 | 0.25 | **0.5** | 9 |" in tables.with_tables(BLOCK)


PARTS = """<!-- parts thing b16 ours; whole = the whole, a_ms = a, b_ms -->
<!-- end of rows -->
"""


def test_parts_stand_below_one_another(tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    assert tables.with_tables(PARTS).splitlines()[3:6] == [
        "| the whole | not measured |", "| a | not measured |", "| b_ms | not measured |"
    ]  # fmt: skip
    zero = replace(ROW, metric="b_ms", value=0.0, p10=0.0, p90=0.0)
    rows = [replace(ROW, metric="whole", value=12.3456, unit=""), replace(ROW, variant="eager", metric="a_ms"), zero]
    write_rows(tmp_path / "benchmarks" / "results" / "thing.csv", rows)
    text = tables.with_tables(PARTS)
    assert text.splitlines()[3:6] == ["| the whole | 12.35 |", "| a | not measured |", "| b_ms | 0 ms |"]
    assert "NVIDIA X, 16 cores" in text
    assert tables.with_tables(text) == text


def test_nothing_measured_is_said(tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    assert "| batch 16 | not measured | not measured | not measured |" in tables.with_tables(BLOCK)


def test_a_table_of_an_ablation(tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    text = "<!-- ablation thing ablation_b16 -->\nold\n<!-- end of ablation -->\n"
    assert tables.with_tables(text) == text.replace("old", "Not measured.")
    rate = replace(ROW, case="ablation_b16", metric="samples_per_second", unit="samples/s")
    rows = [
        replace(rate, variant="none", value=100, p10=99, p90=101),
        replace(rate, variant="all", value=300, p10=297, p90=303),
        replace(rate, variant="only_a", value=210, p10=205, p90=212),
        replace(rate, variant="without_a", value=150, p10=149, p90=151),
        replace(rate, variant="only_b", metric="refused", value=1, note="not here"),
        replace(rate, case="ablation_b32", variant="none", value=7),
    ]
    write_rows(tmp_path / "benchmarks" / "results" / "thing.csv", rows)
    lines = tables.with_tables(text).splitlines()
    assert lines[3:7] == [
        "| nothing | 100 |  |  |  |  |  |  |",
        "| everything | 300 | 3.00 times |  |  |  |  |  |",
        "| a | 210 | 2.10 times | 150 | -50.0% |  |  |  |",
        "| b | refused |  |  |  |  |  |  |",
    ]
    assert "only_b: does not apply: not here. Medians of 30; 10th and 90th percentiles within 2%" in lines[8]


@pytest.mark.parametrize(
    ("value", "text"), [(12615.2, "12615"), (360.51, "360.5"), (0.00802, "0.00802"), (0.0000031, "0.000003"), (0, "0")]
)
def test_figures_are_written_as_people_write_them(tables: ModuleType, value: float, text: str) -> None:
    assert tables._figure(value) == text
