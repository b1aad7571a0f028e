"""Where frozen_bn is put: what a traced forward tells, what is left alone and why, and a measurement."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from frozen_norms import eval_norm, frozen_norm, randomized, run, tiny_resnet
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models.resnet import Bottleneck
from torchvision.ops import FrozenBatchNorm2d

from fasttrain.callbacks.frozen_bn import FrozenBNConfig, FrozenBNOptimization, FrozenBNSurgery
from fasttrain.callbacks.frozen_bn.modules import FrozenBatchNormReLU, FusedBasicBlock, FusedBottleneck
from fasttrain.callbacks.frozen_bn.sites import FrozenBNPatches
from fasttrain.environment import Hardware
from fasttrain.errors import OptimizationError
from fasttrain.optimization import Applies, Change, Context, ExampleBatch

CPU = Hardware("cpu", "cpu", "a CPU", 2)


def test_a_block_used_twice_is_replaced_by_one_block() -> None:
    block = randomized(Bottleneck(8, 2, norm_layer=FrozenBatchNorm2d))
    model = nn.ModuleDict({"a": nn.Sequential(block, block), "b": block})
    x = torch.randn(1, 8, 3, 3)
    wanted = run(model["a"], x)
    surgery = FrozenBNSurgery(model)
    assert [change.path for change in surgery.apply()] == ["b", "a.0", "a.1"]
    assert model["b"] is model["a"][0] is model["a"][1]  # type: ignore[index]
    found = run(model["a"], x)
    torch.testing.assert_close(found, wanted)
    surgery.undo()
    assert model["b"] is model["a"][1] is block  # type: ignore[index]


def test_a_relu_that_others_use_stays_theirs() -> None:
    relu, norm = nn.ReLU(), frozen_norm(3)
    model = nn.Sequential(norm, relu, nn.Conv2d(3, 3, 1), relu, norm)
    x = torch.randn(2, 3, 4, 4)
    wanted = model(x)
    assert FrozenBNSurgery(model).apply() == [Change("0", "FrozenBatchNormReLU")]
    assert model[3] is relu
    assert model[4] is norm
    torch.testing.assert_close(model(x), wanted)


class Stem(nn.Module):
    """Children whose names say nothing about the order in which they run."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.act, self.norm, self.calls = kind, nn.ReLU(), frozen_norm(3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.norm(x)
        if self.kind == "used twice":
            return self.act(y) + y  # type: ignore[no-any-return]
        if self.kind == "relu twice":
            return self.act(self.act(y) - 1)  # type: ignore[no-any-return]
        if self.kind == "depends on values":
            return self.act(y) if x.sum() > 0 else y
        return self.act(y)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "found"), [("plain", 1), ("used twice", 0), ("relu twice", 0), ("depends on values", 0)]
)
def test_a_traced_forward_says_whether_a_relu_follows(kind: str, found: int) -> None:
    model = nn.ModuleDict({"stem": Stem(kind)})
    assert len(FrozenBNPatches().sites(model)) == found
    assert model["stem"].calls == 0, "tracing leaves it as it was"
    x = torch.randn(2, 3, 4, 4)
    wanted = model["stem"](x)
    FrozenBNSurgery(model).apply()
    torch.testing.assert_close(model["stem"](x), wanted)


def with_hook(norm: nn.Module) -> nn.Module:
    norm.register_forward_hook(lambda *_: None)
    return norm


class OwnForward(FrozenBatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("norm", "words"),
    [
        (nn.Identity(), "Sequential has no BatchNorm2d or FrozenBatchNorm2d"),
        (OwnForward(3), "Sequential has no BatchNorm2d or FrozenBatchNorm2d"),
        (nn.BatchNorm2d(3), "its normalizations are: 1 in training mode"),
        (nn.BatchNorm2d(3).eval(), "are: 1 trainable in weight or bias"),
        (nn.BatchNorm2d(3, track_running_stats=False).eval(), "1 without running statistics"),
        (with_hook(frozen_norm(3)), "1 watched by hooks"),
        (nn.Sequential(frozen_norm(3), nn.Sigmoid()), "1 frozen, with no ReLU seen to follow"),
    ],
)
def test_what_can_not_be_fused_is_left_alone_with_a_reason(norm: nn.Module, words: str) -> None:

    model = nn.Sequential(norm, nn.ReLU())
    assert FrozenBNSurgery(model).apply() == []
    assert words in FrozenBNPatches().why_no_site(model)


def test_a_norm_that_begins_to_train_is_an_error() -> None:
    model = nn.Sequential(eval_norm(3), nn.ReLU())
    FrozenBNSurgery(model).apply()
    model(torch.randn(1, 3, 2, 2))
    for change, words in (
        (model.train, "is now in training mode"),
        (model.requires_grad_, "is now trainable in weight or bias"),
    ):
        model.eval().requires_grad_(False)
        change()
        with pytest.raises(
            OptimizationError, match=rf"^frozen_bn: a BatchNorm2d of 3 channels .*{words}; keep it in eval"
        ):
            model(torch.randn(1, 3, 2, 2))


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), eval_norm(4), nn.ReLU())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()  # type: ignore[no-any-return]


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(4, 3, 8, 8)), batch_size=2)


def test_a_real_measurement_of_norms_in_eval_mode_keeps_them_there() -> None:
    module = Classifier()
    context = Context(module, Data(), CPU, example=ExampleBatch(Data()))
    verdict = FrozenBNOptimization(FrozenBNConfig(least_gain=-1e9)).check(context)
    assert isinstance(verdict, Applies)
    assert verdict.note.startswith("1 sites; measured ")
    assert type(module.net[1]) is nn.BatchNorm2d
    assert not module.net[1].training


def test_the_fused_forms_are_still_what_they_were() -> None:
    model = tiny_resnet()
    FrozenBNSurgery(model).apply()
    assert isinstance(model.bn1, FrozenBatchNormReLU)
    assert isinstance(model.layer1[0], FusedBottleneck)
    assert isinstance(model.layer1[0], Bottleneck)
    assert not issubclass(FusedBasicBlock, Bottleneck)
