"""What rooms with patches share: replacement by site, the callback, and a door that measures before it believes."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fasttrain.environment import Hardware
from fasttrain.errors import OptimizationError
from fasttrain.measure import StepProbe
from fasttrain.optimization import Applies, Change, Context, ExampleBatch, Refuses
from fasttrain.patches import ModulePatches, PatchCallback, PatchConfig, PatchOptimization, PatchSite, PatchSurgery
from fasttrain.plan import make_plan

CPU = Hardware("cpu", "cpu", "a CPU", 2)


class LinearReLU(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu_()


def fused_from(linear: nn.Linear) -> LinearReLU:
    new = LinearReLU.__new__(LinearReLU)
    vars(new).update(vars(linear))
    return new


class Pairs(ModulePatches):
    room = "pairs"

    def sites(self, model: nn.Module) -> list[PatchSite]:
        found = []
        for path, parent in model.named_modules():
            children = list(parent.named_children())
            for (name, first), (after, second) in pairwise(children):
                if type(first) is nn.Linear and type(second) is nn.ReLU:
                    names = [f"{path}.{each}".lstrip(".") for each in (name, after)]
                    found.append(
                        PatchSite(names[0], nn.Sequential(first, second), partial(fused_from, first), (names[1],))
                    )
        return found

    def why_no_site(self, model: nn.Module) -> str:
        return f"{type(model).__name__} has no Linear with a ReLU behind it"


class Pairing(PatchOptimization[PatchConfig]):
    name = "pairs"
    summary = "for this test"
    config_class = PatchConfig

    def make_callback(self) -> PatchCallback:
        return PatchCallback(Pairs())


class Net(pl.LightningModule):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(*(layers or (nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=2)


def context(module: pl.LightningModule, example: bool = True, asked: frozenset[str] = frozenset()) -> Context:
    return Context(module, Data(), CPU, example=ExampleBatch(Data()) if example else None, asked_for=asked)


def types(net: nn.Module) -> list[str]:
    return [type(layer).__name__ for layer in net.children()]


PLAIN = ["Linear", "ReLU", "Linear", "ReLU", "Linear"]


def test_every_site_is_replaced_and_put_back() -> None:
    module = Net()
    x, names = torch.randn(3, 4), list(module.state_dict())
    before = module.net(x)
    surgery = PatchSurgery(module, Pairs())
    assert surgery.apply() == [Change("net.0", "LinearReLU"), Change("net.2", "LinearReLU")]
    assert types(module.net) == ["LinearReLU", "Identity", "LinearReLU", "Identity", "Linear"]
    assert torch.equal(module.net(x), before)
    assert list(module.state_dict()) == names
    assert surgery.apply() == [], "a second time there is nothing left"
    surgery.undo()
    assert types(module.net) == PLAIN
    assert torch.equal(module.net(x), before)


def test_only_the_chosen_paths() -> None:
    module = Net()
    assert PatchSurgery(module, Pairs()).apply(only={"net.2", "net.7"}) == [Change("net.2", "LinearReLU")]
    assert types(module.net) == ["Linear", "ReLU", "LinearReLU", "Identity", "Linear"]


def test_a_shared_module_stays_shared() -> None:
    linear = nn.Linear(4, 4)
    module = Net(nn.Sequential(linear, nn.ReLU()), nn.Sequential(linear, nn.ReLU()))
    surgery = PatchSurgery(module, Pairs())
    assert len(surgery.apply()) == 2
    assert module.net[0][0] is module.net[1][0]
    surgery.undo()
    assert module.net[0][0] is linear is module.net[1][0]


def test_the_callback_acts_once_and_can_be_undone() -> None:
    module, callback = Net(), PatchCallback(Pairs())
    for stage in ("fit", "validate"):
        callback.setup(None, module, stage)  # type: ignore[arg-type]
    assert [change.path for change in callback.changes] == ["net.0", "net.2"]
    callback.undo()
    assert types(module.net) == PLAIN
    with pytest.raises(OptimizationError, match=r"^pairs: Net has no Linear with a ReLU behind it; leave it out\.$"):
        callback.setup(None, Net(nn.Tanh()), "fit")  # type: ignore[arg-type]


def test_a_real_measurement_changes_nothing_and_says_both_times() -> None:
    module = Net()
    verdict = Pairing(PatchConfig(least_gain=-1e9)).check(context(module))
    assert isinstance(verdict, Applies)
    assert verdict.note.startswith("2 sites; measured ")
    assert types(module.net) == PLAIN


def test_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"plain": 10.0, "ours": 5.0}

    def timed(self: StepProbe, prepare: Any = None, autocast: Any = None, **options: Any) -> list[float]:
        if prepare is None:
            return [times["plain"]]
        copied = Net()
        prepare(copied, None)
        assert types(copied.net) != PLAIN, "what is timed is the fused form"
        return [times["ours"]]

    monkeypatch.setattr(StepProbe, "sample_ms", timed)
    measured = Pairing(PatchConfig())
    assert measured.check(context(Net())) == Applies("2 sites; measured 5 ms a step against 10 (2.00 times)")
    times["ours"] = 9.9
    slower = "not faster here: 9.9 ms a step against 10 (+1%, at least +2% wanted)"
    assert measured.check(context(Net())) == Refuses(slower)
    assert measured.check(context(Net(nn.Tanh()))) == Refuses("Net has no Linear with a ReLU behind it")
    trusted = Pairing(PatchConfig(measure=False))
    assert trusted.check(context(Net(), example=False)) == Applies("2 sites; not measured, as asked")
    refusal = measured.check(context(Net(), example=False))
    assert refusal == Refuses("there is no batch to measure with; set optimizations.pairs.measure=false to trust")


def test_a_step_that_can_not_be_measured_is_refused_with_its_error() -> None:
    class AsksItsTrainer(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * self.trainer.max_steps

    verdict = Pairing(PatchConfig()).check(context(AsksItsTrainer()))
    assert isinstance(verdict, Refuses)
    assert "could not be measured outside of a Trainer" in verdict.reason
    assert verdict.reason.endswith("; set optimizations.pairs.measure=false to use it unmeasured")


class Whole(nn.Sequential):
    calls_no_child = True

    def forward(self, input: Tensor) -> Tensor:
        return self[0](input).relu()


def test_nothing_is_replaced_in_what_calls_no_child() -> None:
    module = Net(Whole(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4), nn.ReLU())
    assert PatchSurgery(module, Pairs()).apply() == [Change("net.1", "LinearReLU")]
    assert types(module.net[0]) == ["Linear", "ReLU"]


@pytest.mark.parametrize("taken", ["net.0", "net.1", "net."])
def test_what_an_earlier_optimization_takes_is_left(taken: str) -> None:
    optimization = Pairing(PatchConfig(measure=False))
    asked = replace(context(Net()), taken={"net": "another", taken: "another"})
    verdict = optimization.check(asked)
    if taken == "net.":
        assert verdict == Refuses("its 2 sites are in what another fuses")
        return
    assert verdict == Applies("1 sites; not measured, as asked")
    assert optimization.takes(asked) == {"net.2", "net.3"}
    optimization.callback.setup(None, module := Net(), "fit")  # type: ignore[arg-type]
    assert types(module.net) == ["Linear", "ReLU", "LinearReLU", "Identity", "Linear"]


def test_what_calls_no_child_takes_all_inside_and_yields_to_what_is_taken_there() -> None:
    whole = PatchSite("net", nn.Identity(), nn.Identity, calls_no_child=True)
    assert set(whole.takes()) == {"net", "net."}
    assert whole.overlaps(["net.0"])
    assert not PatchSite("net", nn.Identity(), nn.Identity).overlaps(["net.0", "net.0.", "other."])


def test_a_plan_tells_each_what_those_before_it_take() -> None:
    class Later(Pairing):
        name = "later"
        after = frozenset({"pairs"})

    plan = make_plan([Later(PatchConfig(measure=False)), Pairing(PatchConfig(measure=False))], context(Net()))
    assert [(e.optimization.name, e.verdict) for e in plan.entries] == [
        ("pairs", Applies("2 sites; not measured, as asked")),
        ("later", Refuses("its 2 sites are in what pairs fuses")),
    ]
