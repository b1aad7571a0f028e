"""All rooms that patch modules, one after another on one model: the same numbers, and everything can be put back."""

import copy
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torchvision.models.resnet import ResNet, resnet50

from fasttrain.callbacks import CATALOGUE
from fasttrain.environment import Hardware
from fasttrain.optimization import Applies, Context
from fasttrain.patches import PatchCallback, PatchOptimization
from fasttrain.plan import Plan, make_plan, requested
from fasttrain.recipes.retinanet.model import RetinaNet, RetinaNetConfig

CPU = Hardware("cpu", "cpu", "a CPU", 2)
ROOMS = [name for name, room in CATALOGUE.items() if issubclass(room, PatchOptimization)]


class Holder(pl.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


def planned(module: pl.LightningModule) -> Plan:
    wanted, _ = requested({name: {"measure": False} for name in ROOMS}, CATALOGUE)
    return make_plan(wanted, Context(module, pl.LightningDataModule(), CPU, asked_for=frozenset(ROOMS)))


def patch(module: pl.LightningModule) -> dict[str, PatchCallback]:
    """Do what a fit's start does; return the callbacks that acted, in order."""
    plan = planned(module)
    callbacks: dict[str, PatchCallback] = {}
    for entry in plan.entries:
        if isinstance(entry.verdict, Applies):
            (callback,) = entry.optimization.attach(None).callbacks  # type: ignore[arg-type]
            callback.setup(None, module, "fit")  # type: ignore[arg-type]
            callbacks[entry.optimization.name] = callback  # type: ignore[assignment]
            assert entry.optimization.applied(), entry.optimization.name
    return callbacks


def types_of(module: nn.Module) -> dict[str, type[nn.Module]]:
    return {path: type(part) for path, part in module.named_modules()}


def gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    module.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name] - tensor).norm() <= 1e-9 * tensor.norm().clamp(min=1e-9), name


def detector_loss(net: Any, images: Tensor) -> Tensor:
    boxes = torch.tensor([[[4.0, 6, 40, 50], [20, 20, 60, 60]]], dtype=torch.float64).expand(len(images), -1, -1)
    labels = torch.tensor([[1, 3]]).expand(len(images), -1)
    return torch.stack(list(net.loss(net.forward_levels(images), boxes, labels).values())).sum()


def test_on_a_detector_with_frozen_normalization() -> None:
    torch.manual_seed(0)
    config = RetinaNetConfig(num_classes=4, backbone="resnet50", image_size=(64, 64), norm="frozen", fpn_channels=16,
                             head_depth=1, trainable_layers=3)  # fmt: skip
    module = Holder(RetinaNet(config)).double()
    images = torch.rand(2, 3, 64, 64, dtype=torch.float64)
    wanted = gradients(module, detector_loss(module.net, images))
    before, names = types_of(module), list(module.state_dict())
    callbacks = patch(module)
    assert set(callbacks) == {"conv_bias_relu", "bottleneck", "frozen_stem"}, "nothing is left to frozen_bn"
    assert [change.path for change in callbacks["frozen_stem"].changes] == ["net.backbone.body.conv1"]
    assert len(callbacks["bottleneck"].changes) == 4
    assert_close(gradients(module, detector_loss(module.net, images)), wanted)
    assert list(module.state_dict()) == names
    for callback in reversed(callbacks.values()):
        callback.undo()
    assert types_of(module) == before
    assert_close(gradients(module, detector_loss(module.net, images)), wanted)


def test_on_a_classifier_that_trains_its_normalization() -> None:
    torch.manual_seed(0)
    net: ResNet = resnet50(weights=None, num_classes=8)
    module = Holder(net).double()
    plain = copy.deepcopy(module)
    images = torch.rand(3, 3, 64, 64, dtype=torch.float64)
    wanted = gradients(plain, plain.net(images).square().sum())
    assert list(patch(module)) == ["bn_relu"]
    assert_close(gradients(module, module.net(images).square().sum()), wanted)
    for (name, one), other in zip(module.named_buffers(), plain.buffers(), strict=True):
        assert torch.allclose(one, other, rtol=1e-9), name


def test_on_a_transformer_and_a_perceptron() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(),
        nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2), nn.Linear(8, 1),
    )  # fmt: skip
    module = Holder(net).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    wanted = gradients(module, module.net(x).square().sum())
    assert set(patch(module)) == {"gemm_gelu", "gemm_relu", "layer_norm_dropout"}
    assert_close(gradients(module, module.net(x).square().sum()), wanted)
