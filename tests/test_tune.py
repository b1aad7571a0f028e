"""`fasttrain tune`: sites that are the same are measured once, within the budget, kept at once, and told in a table."""

import io
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from rich.console import Console
from scaled_blocks import Blocks, FusedScaled, Scaled, ScaledOptimization, ScaledPatches, TieredOptimization, timing
from torch import nn

from fasttrain import site_timing, tune
from fasttrain.callbacks import CATALOGUE
from fasttrain.choices import BUDGET_SHORT
from fasttrain.choices_file import choices_path, load_choices, save_choice
from fasttrain.cli import main
from fasttrain.environment import Hardware
from fasttrain.errors import ConfigError, DataError, OptimizationError
from fasttrain.plan import Catalogue
from fasttrain.recipe import resolve
from fasttrain.run import prepare
from fasttrain.site_timing import SiteTimes, forward_backward, in_graphs, interleaved_ms, reason_text, time_site
from fasttrain.step_calls import Arguments
from fasttrain.tune_report import progress_line

ROOMS: Catalogue = {
    "scaled": ScaledOptimization,
    "tiered": TieredOptimization,
    **{name: CATALOGUE[name] for name in ("channels_last", "frozen_bn", "precision")},
}
RECIPE = """
recipe: blocks
module: scaled_blocks.Blocks
data: scaled_blocks.BlocksData
trainer: {max_epochs: 1}
optimizations: {scaled: {}}
"""
Times = dict[str, dict[str, float]]
Tune = Callable[..., str]


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FASTTRAIN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "blocks.yaml"
    file.write_text(RECIPE)
    return file


@pytest.fixture
def run(recipe: Path) -> Tune:
    """Tune the recipe and return what was printed."""

    def tune_it(*overrides: str, **options: Any) -> str:
        out = io.StringIO()
        tune.tune(resolve(recipe, ["hardware=cpu", *overrides]), ROOMS, Console(file=out, width=200), **options)
        return out.getvalue()

    return tune_it


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> tuple[Times, list[str]]:
    """Give the times of each site by its path; return them, to be changed, and the paths in the order measured."""
    times: Times = {
        "first": {"plain": 1.0, "compile": 0.9, "ours": 0.5},
        "wide": {"plain": 2.0, "compile": 1.0, "ours": 1.5},
        "shared": {"plain": 3.0, "ours": 3.0},
    }
    order: list[str] = []

    def fake(model: nn.Module, site: Any, calls: Any, device: str, seconds: float, compile_seconds: float) -> SiteTimes:
        order.append(site.path)
        given = times[site.path]
        missing = {} if "compile" in given else {"compile": "RuntimeError: no compiler"}
        return SiteTimes({name: timing(ms) for name, ms in given.items()}, missing, "calls", None)

    monkeypatch.setattr(tune, "time_site", fake)
    return times, order


def kept() -> dict[str, Any]:
    return {entry.seen: entry for entry in load_choices(choices_path(Hardware.cpu().name)).values()}


def table(out: str) -> dict[str, list[str]]:
    """Return the cells of the printed table, by room and site."""
    rows = out.split("milliseconds of one site")[1].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.split("  ") if cell.strip()] for row in rows]
    return {f"{room} {site}": rest for room, site, *rest in cells}


# The whole


def test_each_site_is_measured_once_kept_and_told(run: Tune, timed: tuple[Times, list[str]]) -> None:
    out = run()
    assert timed[1] == ["first", "shared", "wide"], "those with the most elements first"
    rows = table(out)
    assert list(rows) == ["scaled first x2", "scaled wide", "scaled shared"], "what saves most comes first"
    assert rows["scaled first x2"][:5] == ["float32[8, 8] grad", "1", "0.9", "0.5", "ours"]
    assert rows["scaled wide"][:5] == ["float32[4, 16] grad", "2", "1", "1.5", "compile"]
    assert rows["scaled shared"][:5] == ["float32[4, 8] grad and 1 more call", "3", "-", "3", "plain"]
    assert rows["scaled first x2"][5].startswith("1 ms, ")
    assert "scaled unused: the training step does not call it" in out
    assert "scaled: no time of compile, RuntimeError: no compiler (1 site)" in out
    assert "scaled: to be used at 3 of 4 sites, saves 1.5 ms of " in out
    assert "torch.compile is the fastest at 1, saves 1 ms; ask for the optimization `compile`" in out
    assert f"kept in {choices_path(Hardware.cpu().name)}" in out
    assert "[1/3] scaled first: plain 1, compile 0.9, ours 0.5 ms; the fastest is ours" in out

    entries = kept()
    assert set(entries) == {"blocks: first", "blocks: wide", "blocks: shared"}
    assert entries["blocks: first"].winner() == "ours"
    assert entries["blocks: shared"].calls == ("float32[4, 8] grad", "float32[8, 8] grad")
    assert entries["blocks: shared"].module == "Scaled()"
    assert entries["blocks: shared"].precision == "32-true"


def test_the_plan_of_the_next_run_uses_it(
    run: Tune, timed: tuple[Times, list[str]], recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    monkeypatch.setattr("fasttrain.patches.compared_ms", lambda *_: (1.0, 2.0))
    plan = prepare(resolve(recipe, ["hardware=cpu"]), ROOMS).plan
    (room,) = plan.applying
    assert isinstance(room, ScaledOptimization)
    assert room.callback.only == {"first", "alike", "wide"}
    note = plan.record()["optimizations"][0]["reason"]
    assert "3 of 5 sites, by measurement of 20" in note
    assert "(1 not measured)" in note, "the step does not call it"
    other = prepare(resolve(recipe, ["hardware=cpu", "trainer.precision=64-true"]), ROOMS).plan
    assert other.record()["optimizations"][0]["reason"].startswith("not faster here: 2 ms"), "another precision"


def test_what_is_known_is_not_measured_again_unless_asked(run: Tune, timed: tuple[Times, list[str]]) -> None:
    times, order = timed
    run()
    order.clear()
    assert "ours" in table(run())["scaled first x2"], "and it is told all the same"
    assert order == []
    times["first"]["ours"] = 5.0
    assert table(run(again=True))["scaled first x2"][4] == "compile"
    assert sorted(order) == ["first", "shared", "wide"]
    assert kept()["blocks: first"].times["ours"].median_ms == 5.0

    # A site for whose compilation there was no time is worth another try.
    path = choices_path(Hardware.cpu().name)
    (key,) = [key for key, entry in load_choices(path).items() if entry.seen == "blocks: wide"]
    entry = load_choices(path)[key]
    save_choice(path, key, type(entry)(**{**vars(entry), "missing": {"compile": BUDGET_SHORT}}))
    order.clear()
    run()
    assert order == ["wide"]


def test_other_precisions_and_parameters_are_other_entries(run: Tune, timed: tuple[Times, list[str]]) -> None:
    run()
    run("trainer.precision=bf16-mixed")
    run("optimizations.tiered.tier=slow", "optimizations.scaled=false")
    rooms = [entry.room for entry in load_choices(choices_path(Hardware.cpu().name)).values()]
    assert sorted(rooms) == ["scaled"] * 6 + ["tiered {'tier': 'slow'}"] * 3


def test_a_precision_that_may_be_another_in_the_run_is_told(run: Tune, timed: tuple[Times, list[str]]) -> None:
    assert "precision: may choose another than 32-true for the run; set" in run("optimizations.precision=true")


def test_all_measures_every_room_that_patches(run: Tune, timed: tuple[Times, list[str]]) -> None:
    out = run("optimizations=none", every=True)
    assert {row.split(" ")[0] for row in table(out)} == {"scaled", "tiered"}
    assert "frozen_bn: Blocks has no BatchNorm2d or FrozenBatchNorm2d" in out


def test_what_the_budget_does_not_reach_is_told_and_left_to_the_room(
    run: Tune, timed: tuple[Times, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    measure = tune.time_site
    shares = []

    def slow(model: Any, site: Any, calls: Any, device: str, seconds: float, compile_seconds: float) -> SiteTimes:
        shares.append((seconds, compile_seconds))
        now[0] += 25
        return measure(model, site, calls, device, seconds, compile_seconds)

    monkeypatch.setattr(tune, "time_site", slow)
    monkeypatch.setattr(tune, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    out = run(budget_seconds=40)
    assert shares == [(36, 10), (13, 20)], "2 seconds are set aside for each other; a call compiles in 10"
    assert "scaled wide: not measured, the budget was used up; the room's own check decides" in out
    assert set(kept()) == {"blocks: first", "blocks: shared"}

    now[0] = 100.0
    monkeypatch.setattr(tune, "time_site", measure)
    assert "scaled wide" in table(run()), "the next time goes on"
    assert len(kept()) == 3


def test_an_interrupt_keeps_what_was_measured(
    recipe: Path, timed: tuple[Times, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = tune.time_site

    def interrupted(model: Any, site: Any, *rest: Any) -> SiteTimes:
        if site.path == "shared":
            raise KeyboardInterrupt
        return measure(model, site, *rest)

    monkeypatch.setattr(tune, "time_site", interrupted)
    out = io.StringIO()
    assert not tune.tune(resolve(recipe, ["hardware=cpu"]), ROOMS, Console(file=out, width=200))
    assert "scaled wide: not measured, stopped before it" in out.getvalue()
    assert "scaled shared: not measured, stopped before it" in out.getvalue()
    assert set(kept()) == {"blocks: first"}


def test_a_site_whose_plain_module_fails_is_told_and_not_kept(
    run: Tune, timed: tuple[Times, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "time_site", lambda *_: SiteTimes({}, {"plain": "RuntimeError: broken"}, "calls", None))
    out = run()
    assert "[1/3] scaled first: not measured, plain: RuntimeError: broken" in out
    assert kept() == {}


@pytest.mark.parametrize(
    ("overrides", "options", "kind", "sentence"),
    [
        (["optimizations=none"], {}, ConfigError,
         "tune measures optimizations that replace modules of the model, and none is asked for; ask for one, for "
         "instance optimizations.frozen_bn=true, or give --all to measure frozen_bn, scaled, tiered."),
        (["optimizations.scaled=false", "optimizations.channels_last=true"], {}, ConfigError,
         "tune measures optimizations that replace modules of the model, and none of those asked for does "
         "(channels_last); ask for one, for instance optimizations.frozen_bn=true, or give --all to measure "
         "frozen_bn, scaled, tiered."),
        (["optimizations.scaled=false", "optimizations.frozen_bn=true"], {}, OptimizationError,
         "there is no site to measure. frozen_bn: Blocks has no BatchNorm2d or FrozenBatchNorm2d."),
        ([], {"budget_seconds": 0}, ConfigError,
         "--budget is 0; give the seconds that measuring may take, 300 for instance."),
        (["data=test_tune.NoData"], {}, OptimizationError,
         "tune runs the training step by itself: NoData gives no batch to measure with before there is a Trainer "
         "(AttributeError: 'NoneType' object has no attribute 'world_size')."),
        (["data=test_tune.EmptyData"], {}, DataError,
         "the training loader of EmptyData is empty: there is no batch in it."),
        (["module=test_tune.NeedsTrainer"], {}, OptimizationError,
         "tune runs the training step by itself: the step could not be measured outside of a Trainer (RuntimeError: "
         "NeedsTrainer is not attached to a `Trainer`.)."),
        (["module=test_tune.CallsNone"], {}, OptimizationError,
         "there is no site to measure. scaled first: the training step does not call it; scaled alike: the training "
         "step does not call it; scaled wide: the training step does not call it; scaled shared: the training step "
         "does not call it; scaled unused: the training step does not call it."),
    ],
    ids=["none asked for", "no patches", "no site", "no budget", "no batch", "empty", "needs a Trainer", "no call"],
)  # fmt: skip
def test_a_mistake_is_one_sentence(
    run: Tune, overrides: list[str], options: dict[str, Any], kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind) as caught:
        run(*overrides, **options)
    assert str(caught.value) == sentence


class NoData(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return [self.trainer.world_size]


class EmptyData(NoData):
    def train_dataloader(self) -> Any:
        return []


class NeedsTrainer(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]) * self.trainer.world_size


class CallsNone(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.widen(batch[0]).sum()


# One site


def arguments(*inputs: Any, **options: Any) -> Arguments:
    return Arguments(inputs, {}, options.get("autocast"), options.get("grad", True))


def site_of(model: nn.Module, path: str = "first") -> Any:
    return next(site for site in ScaledPatches().sites(model) if site.path == path)


@pytest.fixture
def by_class(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand in for the compiler and the timer; return the alternatives that were timed."""
    seen: list[str] = []

    def timer(calls: Mapping[str, Callable[[], Any]], device: str, until: float) -> dict[str, list[float]]:
        seen.extend(calls)
        for call in calls.values():
            call()
        return {name: [float(number + 1)] * 4 for number, name in enumerate(calls)}

    monkeypatch.setattr(site_timing, "interleaved_ms", timer)
    monkeypatch.setattr(site_timing.torch, "compile", lambda module, **_: module)
    return seen


def test_the_three_alternatives_of_a_site_are_timed_on_copies(by_class: list[str]) -> None:
    model = Blocks()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    times = time_site(model, site_of(model), [arguments(torch.randn(4, 8, requires_grad=True))], "cpu", 60, 10)
    assert by_class == ["plain", "ours", "compile"]
    assert {name: each.median_ms for name, each in times.times.items()} == {"plain": 1, "compile": 3, "ours": 2}
    assert list(times.times) == ["plain", "compile", "ours"]
    assert (times.missing, times.how) == ({}, "calls")
    assert times.compile_seconds is not None
    assert type(model.first) is Scaled
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_an_alternative_that_fails_is_left_out_with_its_reason(
    by_class: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("a  line\nand another. ")

    model = Blocks()
    monkeypatch.setattr(FusedScaled, "forward", fail)
    monkeypatch.setattr(site_timing.torch, "compile", fail)
    given = [arguments(torch.randn(4, 8))]
    times = time_site(model, site_of(model), given, "cpu", 60, 10)
    assert list(times.times) == ["plain"]
    assert times.missing == dict.fromkeys(("ours", "compile"), "ValueError: a line and another")

    times = time_site(model, site_of(model), given, "cpu", 5, 10)
    assert times.missing["compile"] == BUDGET_SHORT
    assert times.compile_seconds is None

    monkeypatch.setattr(Scaled, "forward", fail)
    times = time_site(model, site_of(model), given, "cpu", 60, 10)
    assert (times.times, list(times.missing)) == ({}, ["plain"])
    assert progress_line("x", None, "plain: ValueError") == "x: not measured, plain: ValueError"
    assert len(reason_text(ValueError("x" * 1000))) < 220


def test_the_real_compiler_and_the_real_clock() -> None:
    model = Blocks()
    given = [arguments(torch.randn(4, 8, requires_grad=True)), arguments(torch.randn(2, 8), autocast=torch.bfloat16)]
    times = time_site(model, site_of(model), given, "cpu", 0.5, 10)
    assert set(times.times) == {"plain", "ours"}
    assert times.missing == {"compile": BUDGET_SHORT}
    assert all(0 < each.p10_ms <= each.median_ms <= each.p90_ms for each in times.times.values())
    assert times.times["plain"].repeats >= 2 * site_timing.LEAST_ROUNDS


def test_forward_and_backward_give_every_gradient_and_keep_none() -> None:
    torch.manual_seed(0)
    model = Scaled(8)
    x = torch.randn(4, 8, requires_grad=True)
    step = forward_backward(model, [arguments(x), arguments(torch.randn(2, 8))], torch.device("cpu"))
    of_x, of_scale = step()
    assert (of_x.shape, of_scale.shape) == (x.shape, model.scale.shape)
    assert torch.equal(step()[0], of_x)
    assert x.grad is None
    assert model.scale.grad is None
    assert forward_backward(model, [arguments(x, grad=False)], torch.device("cpu"))() is None
    assert forward_backward(model.requires_grad_(False), [arguments(x.detach())], torch.device("cpu"))() is None


def test_the_alternatives_take_turns_forth_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []
    calls = {name: lambda name=name: turns.append(name) for name in ("plain", "ours")}
    monkeypatch.setattr(site_timing, "SAMPLE_MS", 0.0)
    samples = interleaved_ms(calls, "cpu", time.perf_counter() + 60)
    one_round = ["plain", "ours", "ours", "plain"]
    warmup = 3 * ["plain"] + 3 * ["ours"]
    assert turns == warmup + site_timing.ROUNDS * one_round
    assert {name: len(each) for name, each in samples.items()} == dict.fromkeys(calls, 2 * site_timing.ROUNDS)
    turns.clear()
    interleaved_ms(calls, "cpu", time.perf_counter() - 1)
    assert turns == warmup + site_timing.LEAST_ROUNDS * one_round, "time is up"


def test_short_steps_are_captured_several_times_over_and_all_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[Callable[[], Any]] = []
    done: list[str] = []

    def captured(call: Callable[[], Any], warmup: int = 3) -> Callable[[], Any]:
        if call is failing:
            raise RuntimeError("operation not permitted when stream is capturing")
        captures.append(call)
        return call

    def failing() -> None: ...

    monkeypatch.setattr(site_timing, "captured", captured)
    monkeypatch.setattr(site_timing, "sample_ms", lambda *_, **__: [0.2, 0.125])
    monkeypatch.setattr(site_timing.torch.cuda, "synchronize", lambda: None)
    steps = {name: lambda name=name: done.append(name) for name in ("plain", "ours")}
    how, ready, count = in_graphs(steps)
    assert (how, count) == ("replays of a CUDA graph", 4)
    ready["ours"]()
    assert done == ["ours"] * 4
    assert captures[:2] == list(steps.values())

    how, ready, count = in_graphs({**steps, "compile": failing})
    assert (how, count) == ("calls", 1)
    assert ready["plain"] is steps["plain"], "what can't be captured is compared with what isn't"


# The command


def test_help_teaches(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main(["tune", "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for words in ("--budget SECONDS", "--again", "--all", "FASTTRAIN_CACHE", "fasttrain explain", "KEY=VALUE"):
        assert words in text


FROZEN = """
from torch import nn
from torchvision.ops import FrozenBatchNorm2d
from shapes.model import LitClassifier

class Frozen(LitClassifier):
    def __init__(self, width: int = 4):
        super().__init__(width)
        self.net[1] = FrozenBatchNorm2d(width)
"""


def test_from_the_command_line_to_explain_and_fit(
    foreign_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("COLUMNS", "200")
    shutil.copy(foreign_project / "shapes.yaml", tmp_path)
    Path("frozen_shapes.py").write_text(FROZEN)
    given = ["shapes.yaml", "hardware=cpu", "module.class=frozen_shapes.Frozen", "data.count=32",
             "optimizations.frozen_bn=true", "trainer.max_epochs=1", "loggers=[]"]  # fmt: skip

    def command(*arguments: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        assert not ended.value.code
        return capsys.readouterr().out

    out = command("tune", *given, "--budget", "5")
    (row,) = table(out).items()
    assert row[0] == "frozen_bn net.1"
    assert row[1][0] == "float32[16, 4, 8, 8] channels_last grad"
    assert row[1][2] == "-", "no time to compile in five seconds"

    path = choices_path(Hardware.cpu().name)
    content = json.loads(path.read_text())
    (entry,) = content["sites"].values()
    assert entry["room"] == "frozen_bn"
    assert entry["times"]["plain"]["median_ms"] > 0
    entry["times"]["plain"] = {"median_ms": 9.0, "p10_ms": 9.0, "p90_ms": 9.0, "repeats": 12}
    path.write_text(json.dumps(content))
    assert f"frozen_bn: applies - 1 of 1 sites, by measurement of {entry['date']}" in command("explain", *given)
    command("fit", *given, "--run-dir", "run")
    told = json.loads(Path("run/plan.json").read_text())["optimizations"]
    (changes,) = [each["changes"] for each in told if each["name"] == "frozen_bn"]
    assert [change["path"] for change in changes] == ["net.1"]

    entry["times"]["plain"]["median_ms"] = entry["times"]["plain"]["p10_ms"] = 1e-3
    path.write_text(json.dumps(content))
    assert "frozen_bn: refused - it is the fastest at 0 of 1 sites" in command("explain", *given)
