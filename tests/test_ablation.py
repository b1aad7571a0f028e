"""`fasttrain bench ablate`: a gain, a refusal, a failure and wrong numbers that were put there are told as such."""

import importlib.util
import io
import json
import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import ablated
import pytest
import torch
from rich.console import Console
from torch import nn

from fasttrain import ablation, ablation_child
from fasttrain.ablation import Ablation, Measured, distance, mean_difference, variants_of
from fasttrain.ablation_child import Told, move_by_rounding
from fasttrain.ablation_table import cells_of, lines_of, names_in, print_table, progress_line, reasons_of
from fasttrain.child_process import run_module
from fasttrain.cli import main
from fasttrain.errors import ConfigError
from fasttrain.measure import Row, make_row, read_rows, write_rows
from fasttrain.recipe import resolve

STEPS = 10
ROOT = Path(__file__).parent.parent


def ablate(folder: Path, override: str | None = None, **options: Any) -> Ablation:
    file = folder / "slow.yaml"
    file.write_text(ablated.RECIPE)
    options = {"steps": STEPS, **options}
    return Ablation(resolve(file, [override] if override else []), ablated.CATALOGUE, "ablated:CATALOGUE", **options)


def in_this_process(
    module: str, arguments: Sequence[str], output: Path, timeout: float | None, environment: Mapping[str, str]
) -> int:
    """To start Python and torch for each variant would take minutes; one test below does so once."""
    output.touch()
    ablation_child.main(list(arguments))
    return 0


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[Measured]:
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(ablation, "run_module", in_this_process)
        return list(ablate(tmp_path_factory.mktemp("ablation"), note="as it is").run())


@pytest.fixture(scope="module")
def rows(measured: list[Measured]) -> list[Row]:
    return [row for each in measured for row in each.rows]


def value(rows: list[Row], variant: str, metric: str) -> float:
    (row,) = [row for row in rows if (row.variant, row.metric) == (variant, metric)]
    return row.value


def test_what_was_put_there_is_found(measured: list[Measured], rows: list[Row]) -> None:
    assert [each.variant for each in measured] == [
        "all", "none", "all", "only_quick", "without_quick", "only_wrong", "without_wrong", "only_never",
        "without_never",
    ]  # fmt: skip
    assert {(row.subject, row.case) for row in rows} == {("slow", "ablation_b4")}
    # At most 4 samples in 40 ms, a busy machine makes less of them; and more in a quarter of the time.
    plain, quick = (value(rows, variant, "samples_per_second") for variant in ("none", "only_quick"))
    assert plain <= 4 / 0.04
    assert plain < quick <= 4 / 0.01
    assert value(rows, "without_wrong", "samples_per_second") > plain
    for variant in ("none", "only_quick", "without_quick"):
        assert 0 <= value(rows, variant, "start_up_s") < 60
        assert value(rows, variant, "memory_gb") > 0.1


def test_numbers_that_differ_are_told_from_rounding(rows: list[Row]) -> None:
    assert value(rows, "only_quick", "loss_difference") == 0
    allowed = value(rows, "only_quick", "loss_difference_allowed")
    assert 1e-6 <= allowed < 1e-4, "fp32's rounding, four times"
    assert value(rows, "only_wrong", "loss_difference") > 0.01
    assert value(rows, "only_wrong", "loss_difference_allowed") == allowed
    assert not [row for row in rows if row.variant == "none" and row.metric.startswith("loss")]


def test_refusals_and_failures_have_their_reason(measured: list[Measured], rows: list[Row]) -> None:
    assert measured[0].error == "RuntimeError: no room for two", "the first start"
    reasons = {row.variant: (row.metric, row.note) for row in rows if row.metric in ("refused", "failed")}
    assert reasons == {
        "all": ("failed", "RuntimeError: no room for two"),
        "only_never": ("refused", "it never applies"),
        "without_never": ("refused", "as all, where it does not apply: it never applies"),
    }
    cells = cells_of(rows, "ablation_b4")
    assert reasons_of(cells) == [
        "all: failed: RuntimeError: no room for two",
        "only_never: does not apply: it never applies",
    ]
    assert progress_line(measured[2]) == "[2/8] all: failed: RuntimeError: no room for two"


def test_the_table(rows: list[Row]) -> None:
    cells = cells_of(rows, "ablation_b4")
    lines = {line[0]: line[1:] for line in lines_of(cells)}
    assert list(lines) == ["nothing", "everything", "quick", "wrong", "never"]
    assert lines["everything"][:2] == ["failed", ""]
    assert lines["never"] == ["refused", "", "refused", "", "", "", ""]
    assert lines["quick"][6].startswith("same: 0.0e+00 of ")
    assert lines["wrong"][6].startswith("DIFFER: ")
    console = Console(file=io.StringIO(), width=200)
    print_table(rows, "ablation_b4", ["only_x"], console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "only_never: does not apply: it never applies" in said
    assert "not reached in the time given: only_x" in said


def test_gains_within_the_spread_are_in_brackets() -> None:
    def rate(variant: str, values: list[float]) -> Row:
        return make_row("mine", "ablation", variant, "samples_per_second", "samples/s", values)

    rows = [
        rate("none", [100, 101, 102]), rate("all", [299, 300, 301]), rate("only_a", [101, 102, 103]),
        rate("without_a", [290, 291, 292]), rate("only_b", [97, 98, 99]),
        make_row("mine", "ablation", "all", "cold_start_up_s", "s", [40.0]),
        make_row("mine", "ablation", "all", "start_up_s", "s", [20.0]),
    ]  # fmt: skip
    nothing, everything, a, b = lines_of(cells_of(rows, "ablation"))
    assert nothing[:3] == ["nothing", "101", ""]
    assert everything[:3] == ["everything", "300", "2.97 times"]
    assert everything[6] == "20, the first time 40"
    assert a[1:5] == ["102", "(+1.0%)", "291", "-3.0%"]
    assert b[1:5] == ["98", "-3.0%", "", ""], "losers stay"
    assert names_in(cells_of(rows, "ablation")) == ["a", "b"]


def test_variants() -> None:
    names = [variant.name for variant in variants_of(["a", "b", "c"], ["b"])]
    assert names == ["none", "all", "only_b", "without_b"]
    assert variants_of(["a", "b", "c"], ["b"])[-1].optimizations == ("a", "c")
    assert [variant.name for variant in variants_of(["a"], ["a"])] == ["none", "all"]


@pytest.mark.parametrize(
    ("override", "options", "sentence"),
    [
        (None, {"steps": 3}, r"^--steps is 3; a median with its spread takes at least 10\.$"),
        (None, {"only": ["quik"]}, r"^--only quik: the configuration does not ask for it; did you mean 'quick'\?$"),
        ("optimizations=none", {}, r"^the configuration asks for no optimization, so there is nothing to leave out\.$"),
    ],
)
def test_what_can_not_be_measured(tmp_path: Path, override: str | None, options: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ablate(tmp_path, override, **options)


def test_time_that_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*arguments: Any) -> int:
        time.sleep(0.2)
        return in_this_process(*arguments)

    monkeypatch.setattr(ablation, "run_module", slow)
    one = ablate(tmp_path, limit_seconds=0.3, only=["quick"])
    assert [each.variant for each in one.run()] == ["all"]
    assert one.not_reached == ["none", "all", "only_quick", "without_quick"]


def test_a_process_of_its_own_and_ctrl_c(tmp_path: Path) -> None:
    """The variant's rows are there before the next one begins, and what is running when it is stopped ends."""
    begun: list[str] = []
    one = ablate(tmp_path, "optimizations.wrong=false", only=["quick"])
    one.on_begin = begun.append
    running = one.run()
    write_rows(tmp_path / "rows.csv", next(running).rows)
    assert begun == ["a first start with everything on"]
    with _interrupted_after(0.5), pytest.raises(KeyboardInterrupt):
        next(running)
    assert begun == ["a first start with everything on", "[1/4] none"]
    (kept,) = read_rows(tmp_path / "rows.csv")
    assert (kept.variant, kept.metric) == ("all", "cold_start_up_s")
    assert kept.value > 0.5, "Python and torch are in it"


def test_a_module_that_ends_its_process_or_hangs(tmp_path: Path) -> None:
    printed = tmp_path / "printed.txt"
    assert run_module("timeit", ["-n", "1", "-r", "1"], printed, 60) == 0
    assert "loop" in printed.read_text()
    assert run_module("timeit", ["-n", "1", "-r", "1", "import time; time.sleep(60)"], printed, 0.3) is None
    assert run_module("timeit", ["-s", "import os; os.abort()"], printed, 60) == -signal.SIGABRT
    told = tmp_path / "told.json"
    told.write_text(json.dumps({"losses": [1.0], "plan": {}}))
    why = ablation._told(told, -signal.SIGABRT, printed).error
    assert why.startswith("its process was ended by SIGABRT (Aborted): ")
    why = ablation._told(tmp_path / "none.json", 1, printed).error
    assert why.startswith("its process ended with status 1: ")
    assert ablation._told(told, None, printed).error == "it was not done when the time was over, and was ended"
    assert ablation._told(told, 0, printed) == Told(losses=[1.0])


def test_distances() -> None:
    assert distance([1.0, 2.0], [1.0, 2.0]) == 0
    assert distance([1.1, 2.002], [1.0, 2.0]) == pytest.approx(0.01)
    assert distance([1.0, 2.002], [1.0, 2.0]) == pytest.approx((2**-24 * 1e-3) ** 0.5)
    assert distance([1.0, math.nan], [1.0, 2.0]) == math.inf
    assert mean_difference([2.0, 1.0], [1.0, 2.0]) == 0
    assert mean_difference([2.0, 1.3], [1.0, 2.0]) == pytest.approx(0.1)
    assert mean_difference([1.0, math.inf], [1.0, 2.0]) == math.inf


def test_a_late_divergence_is_rounding_and_an_early_one_a_fault() -> None:
    plain = [1.0] * 20
    rounding = [1 + 1e-6 * 1.8**step for step in range(20)]
    assert distance([2 - loss for loss in rounding], plain) < 4 * distance(rounding, plain)
    assert distance([1.01] * 20, plain) > 4 * distance(rounding, plain)


def test_weights_are_moved_by_a_share_up_or_down() -> None:
    module: Any = nn.Linear(100, 3)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    move_by_rounding(module, 2**-8)
    moved = torch.cat([(module.state_dict()[name] / value - 1).flatten() for name, value in before.items()])
    torch.testing.assert_close(moved.abs(), torch.full_like(moved, 2**-8), rtol=1e-3, atol=0)
    assert 0.3 < (moved > 0).float().mean() < 0.7


@contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_the_picture(rows: list[Row], tmp_path: Path) -> None:
    """Bars of what was measured, words for what was not."""
    spec = importlib.util.spec_from_file_location("plot_ablation", ROOT / "benchmarks" / "plot_ablation.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    write_rows(tmp_path / "slow.csv", rows)
    ((subject, case, cells),) = module.ablations(tmp_path)
    figure = module.figure_of(subject, cells)
    assert (subject, case) == ("slow", "ablation_b4")
    alone, left_out = figure.axes
    (quick, _) = (bar.get_width() for bar in alone.patches)
    gain = value(rows, "only_quick", "samples_per_second") / value(rows, "none", "samples_per_second")
    assert quick == pytest.approx(100 * (gain - 1))
    assert [text.get_text() for text in alone.get_yticklabels()] == ["quick", "wrong", "never"]
    assert " does not apply" in [text.get_text() for text in alone.texts]
    assert " not measured" in [text.get_text() for text in left_out.texts], "everything on failed: nothing to compare"
    figure.savefig(tmp_path / "picture.png")


def test_the_command(
    foreign_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was measured before Ctrl-C is kept and shown."""
    monkeypatch.setenv("COLUMNS", "200")
    starts = iter(("first", "none", "moved", "all"))

    def until_stopped(*arguments: Any) -> int:
        if next(starts) == "all":
            raise KeyboardInterrupt
        return in_this_process(*arguments)

    monkeypatch.setattr(ablation, "run_module", until_stopped)
    recipe, out = foreign_project / "shapes.yaml", tmp_path / "rows.csv"
    with pytest.raises(SystemExit) as ended:
        main(["bench", "ablate", str(recipe), "hardware=cpu", "--steps=10", f"--out={out}"])
    assert ended.value.code == 130
    said = capsys.readouterr().out
    assert "[0/2] all: the first start took " in said
    assert "[1/2] none: " in said
    assert "stopped; what was measured is above" in said
    kept = [(row.variant, row.metric) for row in read_rows(out)]
    assert kept == [
        ("all", "cold_start_up_s"), ("none", "samples_per_second"), ("none", "memory_gb"), ("none", "start_up_s")
    ]  # fmt: skip
    assert next(line for line in said.splitlines() if line.startswith("nothing")).split()[1] != "failed"
