"""Whether compile is taken: what it measures, the toolchain it needs, and the reasons when it refuses."""

import sys
from typing import Any

import lightning.pytorch as pl
import pytest
from compiled_nets import Broken, Lit, Net, reset_after_each_test, trainer
from graph_fits import batches

from fasttrain.callbacks.compile import CompileConfig, CompileOptimization
from fasttrain.callbacks.compile.bench import cases
from fasttrain.callbacks.compile.callback import why_not_in_graph
from fasttrain.callbacks.compile.toolchain import why_not
from fasttrain.callbacks.compile.work import WORKS
from fasttrain.environment import Hardware
from fasttrain.measure import StepProbe
from fasttrain.optimization import Applies, Change, Context, ExampleBatch, Refuses

_nothing_is_compiled_yet = pytest.fixture(autouse=True)(reset_after_each_test)
CPU = Hardware("cpu", "cpu", "a CPU", 2)
GPU = Hardware("gpu", "cuda:0", "NVIDIA H200", 2, (9, 0))


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return batches(2)


def check(module: pl.LightningModule, hardware: Hardware = CPU, asked_for: tuple[str, ...] = (), example: bool = True,
          **parameters: Any) -> Any:  # fmt: skip
    config = CompileConfig(**{"backend": "eager", **parameters})
    drawn = ExampleBatch(Data()) if example else None
    context = Context(module, Data(), hardware, asked_for=frozenset(asked_for), example=drawn)
    return CompileOptimization(config).check(context)


def probe_times(monkeypatch: pytest.MonkeyPatch, plain: float, ours: float) -> None:
    def sample_ms(self: StepProbe, prepare: Any = None, autocast: Any = None, **options: Any) -> list[float]:
        return [plain if prepare is None else ours]

    monkeypatch.setattr(StepProbe, "sample_ms", sample_ms)


def test_it_applies_where_the_step_measures_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    probe_times(monkeypatch, 10.0, 5.0)
    assert check(Lit()) == Applies("3 regions; measured 5 ms a step against 10 (2.00 times)")
    probe_times(monkeypatch, 10.0, 9.9)
    assert check(Lit()) == Refuses("not faster here: 9.9 ms a step against 10 (+1%, at least +2% wanted)")
    assert isinstance(check(Lit(), least_gain=0.005), Applies)


def test_a_real_measurement_tells_what_compiling_took() -> None:
    verdict = check(Lit(), least_gain=-1e9)
    assert isinstance(verdict, Applies)
    assert verdict.note.startswith("3 regions; measured ")
    assert ", compiled in " in verdict.note
    assert verdict.note.endswith(" s (not kept)")


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"modules": ("Blok",)}, "Lit has no module 'Blok', neither by path nor by class; did you mean 'Block'?"),
        ({"example": False}, "there is no batch to measure with; set optimizations.compile.measure=false to trust"),
        ({"backend": "induct"}, "torch.compile has no backend 'induct'; did you mean 'inductor'?"),
        (
            {"mode": "max-autotune"},
            "mode='max-autotune' is inductor's, and backend='eager' has none; leave one of them out",
        ),
    ],
)
def test_refusals(parameters: dict[str, Any], reason: str) -> None:
    assert check(Lit(), **parameters) == Refuses(reason)


@pytest.mark.parametrize(
    ("mode", "instead"), [("reduce-overhead", "default"), ("max-autotune", "max-autotune-no-cudagraphs")]
)
def test_graphs_are_not_put_into_a_graph(mode: Any, instead: Any) -> None:
    assert check(Lit(), hardware=GPU, asked_for=("cuda_graph_step",), mode=mode) == Refuses(
        f"mode='{mode}' replays CUDA graphs of its own, and cuda_graph_step captures the whole step, in which no other "
        f"graph can be; mode='{instead}' goes with it"
    )
    assert why_not_in_graph(instead) is None


def test_what_the_compiler_fails_with_is_the_reason() -> None:
    verdict = check(Lit(Net(Broken(), Broken())), fullgraph=True)
    assert isinstance(verdict, Refuses)
    assert verdict.reason.startswith("'net.blocks.0' (Broken) can't be compiled: ")
    assert verdict.reason.endswith("; set optimizations.compile.measure=false to use it unmeasured")
    assert "\n" not in verdict.reason


def test_unmeasured_as_asked() -> None:
    assert check(Lit(), example=False, measure=False) == Applies("3 regions; not measured, as asked")


@pytest.mark.parametrize(
    ("hardware", "environment", "reason"),
    [
        (
            CPU,
            {"CXX": "no-such-c++ -O2"},
            "there is no compiler 'no-such-c++ -O2' here; install one, or name it in the",
        ),
        (
            GPU,
            {"CC": "no-such-cc"},
            "Triton compiles its launchers in C, and there is no compiler here (no-such-cc); in",
        ),
        (
            Hardware("gpu", "cuda:0", "Tesla P100", 2, (6, 0)),
            {},
            "Tesla P100 has compute capability 6.0, and Triton's kernels need 7.0 or later",
        ),
        (GPU, {"PATH": ""}, "there is no compiler here (gcc or clang); install one, or name it in the environment"),
        (GPU, {}, None),
    ],
)
def test_the_toolchain(
    monkeypatch: pytest.MonkeyPatch, hardware: Hardware, environment: dict[str, str], reason: str | None
) -> None:
    pytest.importorskip("triton")
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = why_not(hardware, "inductor", "default")
    assert found is None if reason is None else found is not None and reason in found


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr("fasttrain.callbacks.compile.toolchain.find_spec", lambda name: None)
    assert why_not(GPU, "inductor", "default") == (
        "torch.compile writes Triton kernels for a GPU, and Triton is not installed; pip install triton"
    )


def test_applied_and_told_through_the_plans_door() -> None:
    optimization = CompileOptimization(CompileConfig(backend="eager", measure=False))
    module = Lit()
    assert list(optimization.applied()) == []
    callbacks = optimization.attach(Context(module, Data(), CPU)).callbacks
    trainer(*callbacks).fit(module, datamodule=Data())
    assert list(optimization.applied()) == [Change(f"net.blocks.{i}", "Block compiled") for i in range(3)]
    (table,) = optimization.outcome()
    assert table.title == "compiled regions"


def test_the_bench_has_a_case_for_each_of_its_networks() -> None:
    assert {case.name for case in cases()} == set(WORKS)
    assert [case.name for case in cases() if not case.needs_gpu] == ["encoder_b8_cpu"]
    work = WORKS["encoder_b8_cpu"]
    products, attention = 12 * 64**2, 2 * 32 * 64  # multiply-adds for each token and layer
    for_input = 3 * 64**2  # the first layer's input has no gradient
    assert work.flop() == 2 * 8 * 32 * (3 * 4 * (products + attention) - for_input)
