"""What is told of compiled regions: graphs, seconds, how they started; and where they are kept."""

import copy
import os
from pathlib import Path

import pytest
import torch
from compiled_nets import Block, Broken, Net, compiled, outputs_and_gradients, reset_after_each_test
from torch import nn

from fasttrain.callbacks.compile.cache import VARIABLES, compiled_folder, kept_in
from fasttrain.callbacks.compile.counts import Counts
from fasttrain.callbacks.compile.reference import TOLERANCE, reference
from fasttrain.callbacks.compile.tally import Tally
from fasttrain.errors import OptimizationError

_nothing_is_compiled_yet = pytest.fixture(autouse=True)(reset_after_each_test)


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
    wanted = outputs_and_gradients(copy.deepcopy(model)[0], x.clone().requires_grad_())
    for _ in range(2):
        torch._dynamo.reset()
        copied = copy.deepcopy(model)
        with kept_in(tmp_path / "cache"):
            regions = compiled(copied, backend="inductor")
            values = outputs_and_gradients(copied[0], x.clone().requires_grad_())
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
