"""The graph step's bench cases, as far as a CPU can tell: networks run, the clock counts right, rows are honest."""

import importlib.metadata
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from fasttrain.callbacks.cuda_graph_step import bench, bench_fit, bench_foreign
from fasttrain.callbacks.cuda_graph_step.bench_fit import FEWEST_WINDOWS, Classifier, StepTimer, timed_fit
from fasttrain.callbacks.cuda_graph_step.callback import CUDAGraphStep


def batches() -> list[Any]:
    return [(torch.randn(4, 128), torch.randint(10, (4,))) for _ in range(2)]


def mlp() -> Classifier:
    return Classifier(bench.make_mlp(), partial(torch.optim.SGD, lr=0.01))


def fit(timer: StepTimer, steps: int, module: Classifier | None = None) -> StepTimer:
    timed_fit(module or mlp(), batches(), timer, steps, accelerator="cpu", enable_progress_bar=False)
    return timer


def test_the_rooms_cases() -> None:
    cases = bench.cases()
    assert [case.name for case in cases] == ["mlp", "resnet18_b8", "loop", "foreign"]
    assert {(case.subject, case.needs_gpu) for case in cases} == {("cuda_graph_step", True)}


@pytest.mark.parametrize(
    ("warm_up", "steps", "windows"),
    [(20, 61, 4), (20, 60, 3), (25, 61, 3), (0, 21, 2), (20, 30, 0)],
)
def test_only_whole_windows_after_the_warm_up_are_timed(warm_up: int, steps: int, windows: int) -> None:
    timer = fit(StepTimer(warm_up, window=10), steps)
    assert (len(timer.step_ms), timer.steps) == (windows, 10 * windows)
    assert (timer.replays, timer.capture_s) == (0, None)


def test_a_window_is_divided_by_its_steps_and_enough_seconds_end_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))  # every look is a second after the last
    monkeypatch.setattr(bench_fit, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    timer = fit(StepTimer(20, window=10, enough_s=7.0), 500)
    assert timer.step_ms == [100.0] * 7
    clock = iter(range(1000))
    timer = fit(StepTimer(20, window=10, enough_s=0.5), 500)
    assert len(timer.step_ms) == FEWEST_WINDOWS, "one slow window is no measurement"


def test_replays_are_told_from_eager_steps() -> None:
    graph = CUDAGraphStep(stand_in=True)
    timer = fit(StepTimer(20, window=10, graph=graph), 61)
    assert timer.replays == timer.steps == 40
    assert timer.capture_s is not None
    assert timer.capture_s > 0
    assert timer.why_not_credited is None
    assert timer.noise == 0.0, "on a CPU a replay is the eager step again"

    class AsksForTheStep(Classifier):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) * (1.0 if self.trainer.global_step < 1000 else 0.5)

    refused = CUDAGraphStep(stand_in=True)
    module = AsksForTheStep(bench.make_mlp(), partial(torch.optim.SGD, lr=0.01))
    with pytest.warns(UserWarning, match="steps run eagerly"):
        timer = fit(StepTimer(20, window=10, graph=refused), 61, module)
    assert (timer.replays, timer.steps, timer.capture_s) == (0, 40, None)
    assert (timer.why_not_credited or "").startswith("0 of 40 timed steps were replays; steps run eagerly, since ")


def test_capturing_takes_until_the_last_checked_replay() -> None:
    graph = CUDAGraphStep(stand_in=True)
    pool: Any = SimpleNamespace(captures=0, hits=0)
    graph.pool = pool
    seen = []
    for pool.captures, pool.hits in ((0, 0), (1, 0), (1, 1), (1, 2)):
        seen.append(bench_fit._is_checked(graph))
    assert seen == [False, False, True, True]
    graph = CUDAGraphStep(stand_in=True, checks=0)
    graph.pool = pool
    pool.captures, pool.hits = 0, 0
    assert not bench_fit._is_checked(graph)


NAMES = ["torchvision_resnet50", "torchvision_vit_b_16", "timm_efficientnet_b0", "transformers_bert_base"]


@pytest.mark.parametrize("name", NAMES)
def test_each_network_takes_a_step(name: str) -> None:
    pytest.importorskip(name.partition("_")[0])
    (network,) = [each for each in bench_foreign.networks(side=32, tokens=16) if each.name == name]
    module: Any = network.make()
    module.log = lambda name, value, **options: logged.append((name, options))
    logged: list[Any] = []
    loss = module.training_step(network.batch(2), 0)
    loss.backward()
    assert 0 < float(loss.detach()) < 20
    assert all(parameter.grad is not None for parameter in module.parameters())
    assert logged == [("loss", {"prog_bar": False})]
    optimizer = module.configure_optimizers()
    assert type(optimizer) is (torch.optim.SGD if "resnet" in name else torch.optim.AdamW)
    assert len(optimizer.param_groups[0]["params"]) == len(list(module.parameters()))


def test_an_absent_package_is_told_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_foreign.importlib.util, "find_spec", lambda name: None if name == "timm" else object())
    assert [network.name for network in bench_foreign.networks()] == [n for n in NAMES if "timm" not in n]
    assert capsys.readouterr().out == "cuda_graph_step: timm_efficientnet_b0 is left out, since timm is not installed\n"


def test_every_sentence_has_words_and_padding() -> None:
    batch = bench_foreign.sentence_batch(16, 64)
    assert {key: tuple(value.shape) for key, value in batch.items()} == {
        "input_ids": (64, 16), "attention_mask": (64, 16), "labels": (64,),
    }  # fmt: skip
    words = batch["attention_mask"].sum(1)
    assert 4 <= int(words.min()) <= int(words.max()) < 16
    assert bool((batch["attention_mask"].diff(dim=1) <= 0).all()), "the padding is at the end"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Stands in for the GPU: the graph step's timer is the given one."""
    plain, ours = StepTimer(20, window=10), StepTimer(20, window=10)
    plain.step_ms, ours.step_ms = [8.0, 9.0], [4.0, 5.0]

    def measure(module: Any, batches: Any, graph: CUDAGraphStep | None) -> tuple[StepTimer, float]:
        if graph is not None:
            graph.notes.append("the optimizer's step is left outside of the graph")
            ours.graph = graph
        return (plain, 1.5) if graph is None else (ours, 2.5)

    monkeypatch.setattr(bench_foreign, "measure", measure)
    return ours


def rows_of(network: str) -> list[Any]:
    (found,) = [each for each in bench_foreign.networks(side=32) if each.name == network]
    return list(bench_foreign.compare(found, mlp(), 4))


def test_rows_of_a_captured_network(measured: StepTimer) -> None:
    measured.replays, measured.capture_s, measured.noise = 20, 0.75, 0.00123
    rows = rows_of("torchvision_resnet50")
    assert {row.case for row in rows} == {"torchvision_resnet50_b4_bf16"}
    assert [(row.variant, row.metric, row.value, row.unit) for row in rows] == [
        ("plain", "step_ms", 8.5, "ms"),
        ("plain", "memory_gb", 1.5, "GB"),
        ("ours", "step_ms", 4.5, "ms"),
        ("ours", "memory_gb", 2.5, "GB"),
        ("ours", "capture_s", 0.75, "s"),
    ]
    version = importlib.metadata.version("torchvision")
    assert all(row.note.startswith(f"ResNet-50, 32², SGD with momentum; torchvision {version}; ") for row in rows)
    assert "left outside" in rows[2].note, "what was not captured stands beside the time"
    assert rows[2].note.endswith("; noise in the self-check 0.0012")


@pytest.mark.parametrize(("replays", "capture_s"), [(0, None), (19, 0.75)])
def test_eager_steps_are_not_credited(measured: StepTimer, replays: int, capture_s: float | None) -> None:
    measured.replays, measured.capture_s = replays, capture_s
    rows = rows_of("torchvision_resnet50")
    assert [(row.variant, row.metric) for row in rows] == [("plain", "step_ms"), ("plain", "memory_gb")]
    reason = f"ours is left out: {replays} of 20 timed steps were replays; the optimizer's step is left outside"
    assert all(reason in row.note for row in rows)


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stands in for the GPU: notes what would be fitted; every step but those of fwd_bwd is a replay."""
    noted: list[Any] = []

    def fitted(module: Classifier, batches: Any, timer: StepTimer, steps: int, **options: Any) -> None:
        pl.Trainer(accelerator="cpu", logger=False, **options)
        assert timer.graph is not None
        config = timer.graph.config
        noted.append((module.logs, module.prog_bar, options, config.scope, config.short_path))
        timer.step_ms, timer.capture_s = [1.0], 0.1
        timer.replays = timer.steps if config.scope == "auto" else 0

    monkeypatch.setattr(bench, "timed_fit", fitted)
    monkeypatch.setattr(bench, "bare_replay", lambda *_: lambda: None)
    monkeypatch.setattr(bench, "windows", lambda *_: [1.0])
    return noted


def test_the_loops_rows(fits: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(bench.loop())
    credited = [case for case in bench.LOOPS if case != "loop_fwd_bwd"]
    assert [(row.case, row.variant) for row in rows] == [
        *((case, variant) for case in credited for variant in ("lightning_path", "short_path")),
        ("loop_no_log", "floor"), ("loop_no_log", "copies"),
    ]  # fmt: skip
    assert "loop_fwd_bwd has no row for short_path: 0 of 50 timed steps were replays" in capsys.readouterr().out
    assert fits[1::2] == [
        (False, False, {}, "auto", True),
        (True, False, {}, "auto", True),
        (True, True, {}, "auto", True),
        (True, False, {"log_every_n_steps": 1}, "auto", True),
        (True, False, {}, "fwd_bwd", True),
    ]
    assert [short for *_, short in fits] == [False, True] * 5
