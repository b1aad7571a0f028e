"""compile: which regions there are, that they give the same numbers, what is told of them, and when it refuses."""

import copy
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from graph_fits import batches
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy
from torchvision.models import efficientnet_b0, resnet18

from fasttrain.callbacks.compile import CompileConfig, CompiledRegions, CompileOptimization, RegionalCompile
from fasttrain.callbacks.compile.bench import cases
from fasttrain.callbacks.compile.cache import VARIABLES, compiled_folder, kept_in
from fasttrain.callbacks.compile.callback import MOST_ROWS, why_not_in_graph
from fasttrain.callbacks.compile.counts import Counts
from fasttrain.callbacks.compile.reference import TOLERANCE, reference
from fasttrain.callbacks.compile.regions import find_regions, why_no_region
from fasttrain.callbacks.compile.tally import COLUMNS, Tally
from fasttrain.callbacks.compile.toolchain import why_not
from fasttrain.callbacks.compile.work import WORKS
from fasttrain.callbacks.cuda_graph_step import CUDAGraphStep
from fasttrain.environment import Hardware
from fasttrain.errors import OptimizationError
from fasttrain.measure import StepProbe
from fasttrain.optimization import Applies, Change, Context, ExampleBatch, Refuses

CPU = Hardware("cpu", "cpu", "a CPU", 2)
GPU = Hardware("gpu", "cuda:0", "NVIDIA H200", 2, (9, 0))


class Block(nn.Module):
    """A residual block; `width` is its input's and output's."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(width, width), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.linear(x))


class Broken(Block):
    """Can't be one graph."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        torch._dynamo.graph_break()
        return y * 2


class Net(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(blocks or (Block() for _ in range(3)))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Lit(pl.LightningModule):
    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net or Net()
        self.accuracy = MulticlassAccuracy(4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.accuracy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=2**-6)


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return batches(2)


@pytest.fixture(autouse=True)
def _nothing_is_compiled_yet() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def compiled(model: nn.Module, *modules: str, **options: Any) -> CompiledRegions:
    regions = CompiledRegions(model, modules, **{"backend": "eager", **options})
    regions.apply()
    return regions


def trainer(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    defaults = {"accelerator": "cpu", "enable_checkpointing": False, "max_epochs": 1}
    return pl.Trainer(callbacks=list(callbacks), **{**quiet, **defaults, **options})  # type: ignore[arg-type]


def paths(model: nn.Module, *wanted: str) -> list[str]:
    return [region.path for region in find_regions(model, wanted)]


def test_repeated_blocks_are_the_regions() -> None:
    assert paths(Lit()) == ["net.blocks.0", "net.blocks.1", "net.blocks.2"]
    assert paths(Lit(resnet18(weights=None))) == [f"net.layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1)]
    of_efficientnet = paths(efficientnet_b0(weights=None))
    assert {"features.0", "features.1", "features.2.0", "features.2.1", "features.8"} <= set(of_efficientnet)
    assert "features.2" not in of_efficientnet, "a stage of blocks gives way to them"


def test_without_repeated_blocks_it_is_the_children() -> None:
    alone = nn.ModuleList([Block(), nn.Linear(8, 8)])
    module = Lit(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))
    module.more = alone
    assert paths(module) == ["net", "more.0", "more.1"], "no metric, and members of what can't be called"


def test_modules_by_path_and_by_class() -> None:
    module = Lit()
    assert paths(module, "net.head", "Block") == ["net.head", "net.blocks.0", "net.blocks.1", "net.blocks.2"]
    assert paths(module, "net", "Block") == ["net"], "the outermost"
    shared = Net(block := Block(), Block(), block)
    assert paths(shared) == ["blocks.0", "blocks.1"]
    assert paths(shared, "blocks.2") == ["blocks.2"]


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ("net.haed", "Lit has no module 'net.haed', neither by path nor by class; did you mean 'net.head'?"),
        ("Blok", "Lit has no module 'Blok', neither by path nor by class; did you mean 'Block'?"),
        ("net.blocks", "'net.blocks' is a ModuleList, which is not called itself; name its members, or their class"),
    ],
)
def test_names_that_mean_nothing(wanted: str, says: str) -> None:
    with pytest.raises(OptimizationError) as raised:
        find_regions(Lit(), [wanted])
    assert str(raised.value) == says


def test_what_is_compiled_already_is_left_alone() -> None:
    net = Net()
    net.blocks[0].compile(backend="eager")
    assert paths(net) == ["blocks.1", "blocks.2"]
    assert paths(net, "blocks.0") == []
    whole = Lit(torch.compile(nn.Sequential(nn.Linear(8, 4)), backend="eager"))  # type: ignore[arg-type]
    assert paths(whole) == []
    assert why_no_region(whole) == "Lit has no submodule with parameters and a forward that is not compiled yet"


def test_outputs_and_gradients_are_those_of_the_reference() -> None:
    torch.manual_seed(0)
    dtype = torch.float32
    model = Net()
    plain = copy.deepcopy(model)
    regions = compiled(model, backend="aot_eager", fullgraph=True)
    for rows in (4, 0, 3):
        x = torch.randn(rows, 8, dtype=dtype)
        xs = [x.clone().requires_grad_() for _ in range(2)]
        for one, other in zip(_values(model, xs[0]), _values(plain, xs[1]), strict=True):
            torch.testing.assert_close(one, other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(reference(model.blocks[0], x), plain.blocks[0](x))
    assert [tally.calls for tally in regions.tallies] == [3, 3, 3], "the reference goes by Python"


def _values(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    output = model(x)
    output.square().sum().backward()
    return [output, x.grad, *(parameter.grad for parameter in model.parameters())]  # type: ignore[list-item]


def test_a_block_in_two_places_is_one_region() -> None:
    torch.manual_seed(0)
    shared = Net(block := Block(), Block(), block)
    plain = copy.deepcopy(shared)
    regions = compiled(shared, backend="aot_eager")
    x = torch.randn(2, 8)
    xs = [x.clone().requires_grad_() for _ in range(2)]
    for one, other in zip(_values(shared, xs[0]), _values(plain, xs[1]), strict=True):
        torch.testing.assert_close(one, other)
    assert [(tally.path, tally.calls) for tally in regions.tallies] == [("blocks.0", 2), ("blocks.1", 1)]


def test_names_stay_and_undo_takes_everything_back() -> None:
    model = Net()
    before = {path: sorted(vars(module)) for path, module in model.named_modules()}
    names = list(model.state_dict())
    regions = CompiledRegions(model, backend="eager")
    assert regions.apply() == [Change(f"blocks.{i}", "Block compiled") for i in range(3)]
    assert list(model.state_dict()) == names
    assert regions.apply() == [], "once is enough"
    model(torch.randn(2, 8))
    assert [tally.calls for tally in regions.tallies] == [1, 1, 1]
    assert copy.deepcopy(model).blocks[0]._compiled_call_impl is None, "copies run in Python, EMA's for instance"
    regions.undo()
    assert {path: sorted(vars(module)) for path, module in model.named_modules()} == before
    assert all(block._compiled_call_impl is None for block in model.blocks)
    assert paths(model) == ["blocks.0", "blocks.1", "blocks.2"]


def test_undo_leaves_what_somebody_else_compiled_meanwhile() -> None:
    model = Net()
    regions = compiled(model)
    model.blocks[0].compile(backend="eager")
    regions.undo()
    assert model.blocks[0]._compiled_call_impl is not None


def test_blocks_that_look_alike_compile_once() -> None:
    model = Net(*(Block() for _ in range(12)))
    regions = compiled(model)
    model(torch.randn(2, 8))
    assert [tally.counts.graphs for tally in regions.tallies] == [1, *[0] * 11]
    assert [tally.start for tally in regions.tallies] == ["not kept", *["shared"] * 11]


def test_blocks_of_one_class_with_many_shapes_are_all_compiled() -> None:
    widths = range(4, 10)
    model = nn.ModuleList(Block(width) for width in widths)
    regions = compiled(model, fullgraph=True)
    with torch._dynamo.config.patch(recompile_limit=3):
        for width, block in zip(widths, model, strict=True):
            block(torch.randn(2, width))
    assert {tally.counts.graphs for tally in regions.tallies} == {1}
    assert {tally.recompilations for tally in regions.tallies} == {0}
    assert {tally.counts.failed for tally in regions.tallies} == {0}


def test_sizes_seen_in_evaluation_are_none_of_trainings() -> None:
    model = Net(Block(), Block())
    regions = compiled(model)
    model.eval()(torch.randn(5, 8))
    model.train()(torch.randn(2, 8))
    model(torch.randn(2, 8))
    assert [tally.recompilations for tally in regions.tallies] == [0, 0]
    model(torch.randn(3, 8))
    assert [tally.recompilations for tally in regions.tallies] == [1, 0], "now sizes vary in training"
    model(torch.randn(4, 8))
    assert [tally.recompilations for tally in regions.tallies] == [1, 0], "and the graph takes them all"


def test_dynamic_is_handed_on() -> None:
    for dynamic, graphs in ((True, 1), (False, 3)):
        model = Net(Block(), Block())
        regions = compiled(model, dynamic=dynamic)
        for rows in (2, 3, 4):
            model(torch.randn(rows, 8))
        assert regions.tallies[0].counts.graphs == graphs


def test_graph_breaks_are_counted_and_fullgraph_makes_them_errors() -> None:
    model = Net(Broken(), Broken())
    regions = compiled(model)
    model(torch.randn(2, 8))
    assert regions.tallies[0].counts.breaks >= 1
    assert regions.tallies[0].counts.graphs == 2
    regions.undo()
    compiled(model, fullgraph=True)
    with pytest.raises(OptimizationError, match=r"^compile: 'blocks.0' \(Broken\) can't be compiled: .+\. Name other"):
        model(torch.randn(2, 8))


def test_a_models_own_error_stays_its_own() -> None:
    model = Net()
    compiled(model)
    with pytest.raises(RuntimeError, match=r"reduction dim|cannot be multiplied"):
        model.blocks[0](torch.randn(2, 9))


def test_hooks_run() -> None:
    model = Net()
    model.blocks[1].register_forward_hook(lambda module, args, output: output * 0)
    compiled(model)
    x = torch.randn(2, 8)
    assert model.blocks[1](x).abs().max() == 0
    assert model.blocks[0](x).abs().max() > 0


def test_within_something_that_is_compiled_whole() -> None:
    model = Net()
    regions = compiled(model)
    x = torch.randn(2, 8)
    wanted = reference(model, x)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), wanted)
    assert [tally.calls for tally in regions.tallies] == [1, 1, 1], "those of the reference"


def test_seconds_are_those_of_compiled_calls_less_those_of_later_ones() -> None:
    tally = Tally("net", compilations=2, first_seconds=10.0, later_seconds=1.0)
    assert tally.compile_seconds == 8.0
    tally.backward = [(True, 5.0), (False, 2.0), (False, 3.0)]
    assert tally.compile_seconds == 11.0


@pytest.mark.parametrize(
    ("calls", "compilations", "hits", "misses", "start"),
    [
        (0, 0, 0, 0, "never called"),
        (3, 0, 0, 0, "shared"),
        (3, 1, 0, 0, "not kept"),
        (3, 1, 0, 2, "cold"),
        (3, 1, 2, 0, "warm"),
        (3, 1, 1, 1, "partly warm"),
        (3, 0, 0, 1, "cold"),
    ],
)
def test_how_it_started(calls: int, compilations: int, hits: int, misses: int, start: str) -> None:
    counts = Counts(hits=hits, misses=misses)
    assert Tally("net", calls=calls, compilations=compilations, counts=counts).start == start


def test_counters_that_were_set_back_give_no_negative_counts() -> None:
    assert Counts(frames=1).since(Counts(frames=5, graphs=1)) == Counts()
    assert Counts(frames=1, hits=2).plus(Counts(frames=5)) == Counts(frames=6, hits=2)


def test_the_backward_is_timed_too() -> None:
    model = Net()
    regions = compiled(model, backend="aot_eager")
    for _ in range(5):
        model(torch.randn(2, 8)).sum().backward()
    for tally in regions.tallies:
        assert 2 <= len(tally.backward) <= 4, "a compiled one, where it was, and two later ones"
    assert regions.tallies[0].backward[0][0]


def test_by_inductor_cold_and_warm(tmp_path: Path) -> None:
    torch.manual_seed(0)
    found = []
    model = nn.ModuleList([Block()])
    x = torch.randn(4, 8)
    wanted = _values(copy.deepcopy(model)[0], x.clone().requires_grad_())
    for _ in range(2):
        torch._dynamo.reset()
        copied = copy.deepcopy(model)
        with kept_in(tmp_path / "cache"):
            regions = compiled(copied, backend="inductor")
            values = _values(copied[0], x.clone().requires_grad_())
        for one, other in zip(values, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=TOLERANCE[torch.float32], atol=TOLERANCE[torch.float32])
        found.append(regions.tallies[0])
    told = [(tally.start, tally.counts.hits, tally.counts.misses) for tally in found]
    assert told == [("cold", 0, 2), ("warm", 2, 0)]
    assert found[1].compile_seconds < found[0].compile_seconds
    assert any((tmp_path / "cache").iterdir())


def test_the_compiled_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FASTTRAIN_CACHE", str(tmp_path))
    assert compiled_folder(None, "bf16-mixed") == tmp_path / "compiled" / "bf16-mixed"
    assert compiled_folder("~/mine", "32-true") == Path.home() / "mine" / "32-true"
    monkeypatch.delenv("FASTTRAIN_CACHE")
    assert compiled_folder(None, "32-true") == Path.home() / ".cache" / "fasttrain" / "compiled" / "32-true"


def test_torch_looks_there_as_long_as_it_is_asked_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with kept_in(tmp_path / "a" / "b"):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "a" / "b")
        os.environ["TRITON_CACHE_DIR"] = "set by torch"
    assert [os.environ.get(name) for name in VARIABLES] == ["elsewhere", None]
    (tmp_path / "file").touch()
    says = "file can't be written .*; name another in optimizations.compile.cache_dir or the environment .* FASTTRAIN_C"
    with pytest.raises(OptimizationError, match=says), kept_in(tmp_path / "file"):
        pass


def fitted(*callbacks: pl.Callback, seed: int = 0, **options: Any) -> Lit:
    pl.seed_everything(seed)
    module = Lit()
    trainer(*callbacks, **options).fit(module, batches(4), batches(1, rows=(3,)))  # type: ignore[arg-type]
    return module


def assert_equal_weights(one: nn.Module, other: nn.Module) -> None:
    for (name, value), wanted in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(value, wanted, msg=name)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_fit_with_and_without(precision: Any) -> None:
    before = dict(os.environ)
    callback = RegionalCompile(backend="aot_eager")
    assert_equal_weights(fitted(callback, precision=precision), fitted(precision=precision))
    assert [change.path for change in callback.changes] == ["net.blocks.0", "net.blocks.1", "net.blocks.2"]
    assert {name: os.environ.get(name) for name in VARIABLES} == {name: before.get(name) for name in VARIABLES}
    table = callback.table()
    assert table.columns == COLUMNS
    assert [row[0] for row in table.rows] == ["net.blocks.0", "net.blocks.1", "net.blocks.2", "all"]
    assert table.rows[0][1] == 4 + 2, "four steps, one validation and its rehearsal"
    assert table.rows[0][2:5] == (2, 0, 0), "one graph for training, one for evaluation"
    assert table.rows[-1][1] == 18


def test_checkpoints_go_both_ways(tmp_path: Path) -> None:
    options = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    for first, second in ((RegionalCompile(backend="eager"), None), (None, RegionalCompile(backend="eager"))):
        one = trainer(*[first] if first else [], **options)
        one.fit(Lit(), batches(2))  # type: ignore[arg-type]
        path = tmp_path / "last.ckpt"
        one.save_checkpoint(path)
        other = Lit()
        again = trainer(*[second] if second else [], **{**options, "max_epochs": 2})
        again.fit(other, batches(2), ckpt_path=str(path))  # type: ignore[arg-type]
        assert again.global_step == 4


def test_with_a_captured_step() -> None:
    callback, step = RegionalCompile(backend="aot_eager"), CUDAGraphStep(stand_in=True, on_failure="error")
    assert_equal_weights(fitted(callback, step, max_epochs=3), fitted(max_epochs=3))
    assert step.changes
    assert sum(tally.hits for tally in step.pool.tallies.values()) > 0
    assert [tally.counts.graphs for tally in callback.tallies] == [2, 0, 0], "nothing is compiled at the capture"


def test_undo_after_a_fit_and_a_second_stage() -> None:
    callback = RegionalCompile(backend="eager")
    module = fitted(callback)
    trainer(callback).validate(module, batches(1), verbose=False)  # type: ignore[arg-type]
    assert len(callback.tallies) == 3
    callback.undo()
    assert all(block._compiled_call_impl is None for block in module.net.blocks)  # type: ignore[union-attr]


class Fails(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise ValueError("mine")


def test_after_an_error_the_cache_is_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    with pytest.raises(ValueError, match="mine"):
        trainer(RegionalCompile(backend="eager")).fit(Fails(), batches(1))  # type: ignore[arg-type]
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"


def test_the_callback_takes_the_modules_that_are_named() -> None:
    callback = RegionalCompile(backend="eager", modules=("net.stem",))
    fitted(callback)
    assert [change.path for change in callback.changes] == ["net.stem"]
    says = "compile: Lit has no module 'nett', neither by path nor by class; did you mean 'net'?"
    with pytest.raises(OptimizationError) as raised:
        fitted(RegionalCompile(backend="eager", modules=("nett",)))
    assert str(raised.value) == says


class NoChildren(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (batch[0] @ self.weight).square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_nothing_to_compile_is_an_error() -> None:
    with pytest.raises(OptimizationError, match=r"^compile: NoChildren has no submodule with parameters.*; leave it o"):
        trainer(RegionalCompile(backend="eager")).fit(NoChildren(), batches(1))  # type: ignore[arg-type]


def test_a_table_of_many_regions_is_cut() -> None:
    callback = RegionalCompile(backend="eager")
    module = Lit(Net(*(Block() for _ in range(MOST_ROWS + 5))))
    trainer(callback).fit(module, batches(1))  # type: ignore[arg-type]
    rows = callback.table().rows
    assert len(rows) == MOST_ROWS + 2
    assert [row[0] for row in rows[-2:]] == ["5 further regions", "all"]
    assert [row[1] for row in rows[-2:]] == [5, MOST_ROWS + 5]


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


def test_a_step_of_the_bench() -> None:
    work = WORKS["encoder_b8_cpu"]
    model, batch = work.made()
    regions = compiled(model)
    work.step(model, model, batch)()
    assert [tally.calls for tally in regions.tallies] == [1] * 4
    assert all(parameter.grad is not None for parameter in model.parameters())
