"""compile: which regions there are, that they give the same numbers, and what a compiled region keeps."""

import copy

import pytest
import torch
from compiled_nets import Block, Lit, Net, compiled, outputs_and_gradients, reset_after_each_test
from torch import nn
from torchvision.models import efficientnet_b0, resnet18

from fasttrain.callbacks.compile import CompiledRegions
from fasttrain.callbacks.compile.reference import TOLERANCE, reference
from fasttrain.callbacks.compile.regions import find_regions, why_no_region
from fasttrain.callbacks.compile.work import WORKS
from fasttrain.errors import OptimizationError
from fasttrain.optimization import Change

_nothing_is_compiled_yet = pytest.fixture(autouse=True)(reset_after_each_test)


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
        for one, other in zip(outputs_and_gradients(model, xs[0]), outputs_and_gradients(plain, xs[1]), strict=True):
            torch.testing.assert_close(one, other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(reference(model.blocks[0], x), plain.blocks[0](x))
    assert [tally.calls for tally in regions.tallies] == [3, 3, 3], "the reference goes by Python"


def test_a_block_in_two_places_is_one_region() -> None:
    torch.manual_seed(0)
    shared = Net(block := Block(), Block(), block)
    plain = copy.deepcopy(shared)
    regions = compiled(shared, backend="aot_eager")
    x = torch.randn(2, 8)
    xs = [x.clone().requires_grad_() for _ in range(2)]
    for one, other in zip(outputs_and_gradients(shared, xs[0]), outputs_and_gradients(plain, xs[1]), strict=True):
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


def test_a_step_of_the_bench() -> None:
    work = WORKS["encoder_b8_cpu"]
    model, batch = work.made()
    regions = compiled(model)
    work.step(model, model, batch)()
    assert [tally.calls for tally in regions.tallies] == [1] * 4
    assert all(parameter.grad is not None for parameter in model.parameters())
