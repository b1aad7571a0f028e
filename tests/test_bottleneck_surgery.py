"""Where bottleneck puts its stages, what stays as it was, and the constants of their norms."""

import copy
import io
from typing import Any

import pytest
import torch
from bottleneck_stages import (
    eval_norm,
    feature_map,
    fused,
    gradients,
    randomized,
    stage,
)
from torch import Tensor, nn
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.ops import FrozenBatchNorm2d

from fasttrain.callbacks.bottleneck import (
    BottleneckOptimization,
    BottleneckPatches,
    BottleneckSurgery,
    FusedStage,
)
from fasttrain.callbacks.bottleneck.constants import Constants
from fasttrain.callbacks.bottleneck.reference import off
from fasttrain.callbacks.frozen_bn import FrozenBNSurgery
from fasttrain.errors import OptimizationError
from fasttrain.optimization import Change


def test_constants_stay_where_they_are_and_follow_their_norm() -> None:
    norm = randomized(FrozenBatchNorm2d(4))
    constants = Constants(norm)
    first = constants(torch.bfloat16)
    assert first.rounded.dtype == torch.bfloat16
    assert constants(torch.bfloat16).rounded is first.rounded
    assert constants(torch.float32).rounded is first.bias
    norm.load_state_dict({key: value + 1 for key, value in norm.state_dict().items()})
    again = constants(torch.bfloat16)
    assert again.rounded is first.rounded, "in the same memory, which a captured graph reads"
    assert torch.equal(again.rounded, again.bias.bfloat16())


def test_a_norm_that_begins_to_train_is_an_error() -> None:
    net = fused(stage(norm=eval_norm))
    for change, words in (
        (lambda: net.train(), "is now in training mode"),
        (lambda: net[0].bn2.requires_grad_(), "is now trainable in weight or bias"),
    ):
        net.eval()
        net(feature_map((1, 16, 2, 2)))
        change()
        with pytest.raises(OptimizationError, match=rf"^bottleneck: a BatchNorm2d of 16 .*{words}; keep it in eval"):
            net(feature_map((1, 16, 2, 2)))


def tiny_resnet(norm: Any = FrozenBatchNorm2d, block: Any = Bottleneck, **options: Any) -> ResNet:
    torch.manual_seed(0)
    return randomized(ResNet(block, [2, 1, 1, 1], num_classes=4, norm_layer=norm, **options))  # type: ignore[return-value]


def run(model: nn.Module, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    outputs = model(images)
    flat = torch.cat([y.flatten() for y in outputs.values()]) if isinstance(outputs, dict) else outputs
    flat.square().mean().backward()
    return flat.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["resnet", "eval mode", "dilated", "detection"])
def test_surgery_keeps_numbers_and_names_and_can_be_undone(kind: str) -> None:
    options = {"replace_stride_with_dilation": [False, True, True]} if kind == "dilated" else {}
    model: nn.Module = tiny_resnet(eval_norm if kind == "eval mode" else FrozenBatchNorm2d, **options)
    if kind == "detection":
        model = IntermediateLayerGetter(model, {"layer2": "0", "layer4": "1"})
    images = torch.randn(2, 3, 32, 32)
    names, types = list(model.state_dict()), {path: type(m) for path, m in model.named_modules()}
    parameters, modes = list(model.parameters()), [m.training for m in model.modules()]
    before = run(model, images)
    surgery = BottleneckSurgery(model, side_streams=2)
    assert surgery.apply() == [Change(f"layer{i}", "FusedStage") for i in range(1, 5)]
    assert surgery.apply() == [], "a second time there is nothing left"
    assert model.layer3.side_streams == 2  # type: ignore[union-attr]
    after = run(model, images)
    torch.testing.assert_close(after[0], before[0], rtol=1e-4, atol=1e-5)
    assert after[1].keys() == before[1].keys()
    for key, gradient in after[1].items():
        assert off(gradient, before[1][key].double()) < 1e-3
    assert list(model.state_dict()) == names
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(run(copy.deepcopy(model), images)[0], after[0])
    assert isinstance(model.layer1[1], Bottleneck)  # type: ignore[index]
    surgery.undo()
    assert {path: type(m) for path, m in model.named_modules()} == types
    again = run(model, images)
    assert torch.equal(again[0], before[0])
    assert all(torch.equal(gradient, before[1][key]) for key, gradient in again[1].items())


def test_frozen_bn_takes_what_is_left() -> None:
    model, images = tiny_resnet(), torch.randn(2, 3, 32, 32)
    before = run(model, images)
    BottleneckSurgery(model).apply()
    assert Change("bn1", "FrozenBatchNormReLU") in FrozenBNSurgery(model).apply()
    after = run(model, images)
    torch.testing.assert_close(after[0], before[0], rtol=1e-4, atol=1e-5)
    assert all(off(gradient, before[1][key].double()) < 1e-3 for key, gradient in after[1].items())
    assert BottleneckOptimization.before == {"frozen_bn"}


def test_no_block_is_called_and_a_part_of_a_stage_is_one() -> None:
    net, x = fused(stage(blocks=3)), feature_map((1, 16, 2, 2))
    wanted = net[2](net[:2](x))
    assert type(net[:2]) is FusedStage
    assert net[:0](x) is x

    def stop(*_: Any) -> None:
        raise AssertionError("a block was called by itself")

    for module in net[0].modules():
        module.register_forward_hook(stop)
    torch.testing.assert_close(net(x), wanted, rtol=1e-4, atol=1e-5)


def test_a_stages_own_hooks_stay() -> None:
    plain = stage()
    plain.register_forward_hook(lambda module, inputs, output: output + 1)
    assert fused(plain)(feature_map((1, 16, 2, 2))).min() == 1


def test_checkpoints_load_both_ways() -> None:
    plain, ours = tiny_resnet(), tiny_resnet()
    BottleneckSurgery(ours).apply()
    with torch.no_grad():
        for value in plain.state_dict().values():
            value.mul_(1.1)
    images = torch.randn(1, 3, 32, 32)
    ours(images)
    file = io.BytesIO()
    torch.save(plain.state_dict(), file)
    file.seek(0)
    ours.load_state_dict(torch.load(file))
    torch.testing.assert_close(ours(images), plain(images), rtol=1e-3, atol=1e-4)
    tiny_resnet().load_state_dict(ours.state_dict())


def test_torch_compile_takes_the_blocks_whole() -> None:
    plain, x = stage(blocks=1), feature_map((1, 16, 3, 3))
    wanted = gradients(plain, x)
    compiled: Any = torch.compile(fused(plain), backend="eager", fullgraph=True)
    found = gradients(compiled, x)
    torch.testing.assert_close(found[0], wanted[0])
    torch.testing.assert_close(found[2], wanted[2])


def with_hook(net: nn.Sequential) -> nn.Sequential:
    net[0].conv2.register_forward_hook(lambda *_: None)
    return net


def changed(**parts: Any) -> nn.Sequential:
    net = stage()
    for name, part in parts.items():
        setattr(net[1], name, part)
    return net


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (nn.Sequential(nn.ReLU()), "has no nn.Sequential of torchvision's Bottlenecks"),
        (nn.Sequential(*stage(), nn.ReLU()), "has 2 Bottlenecks, and no nn.Sequential of nothing but torchvision's"),
        (stage(norm=nn.BatchNorm2d), "of its nn.Sequentials of Bottlenecks, 1 with a normalization in training mode"),
        (stage(norm=lambda c: nn.BatchNorm2d(c).eval()), "1 with a normalization trainable in weight or bias"),
        (stage(norm=lambda c: nn.GroupNorm(2, c)), "1 with GroupNorm as its normalization"),
        (with_hook(stage()), "1 with a Conv2d watched by hooks"),
        (changed(relu=nn.SiLU()), "1 with SiLU in place of ReLU"),
        (changed(conv1=nn.Conv2d(64, 16, 1)), "1 with a convolution that has a bias"),
        (changed(conv3=nn.Conv2d(16, 64, 3, padding=1, bias=False)), "convolution that is not a plain 1x1"),
        (changed(conv1=nn.Conv2d(64, 16, 1, 2, bias=False)), "a stride elsewhere than in the convolution in the"),
        (changed(conv2=nn.Conv2d(16, 16, 3, padding="same", bias=False)), "a convolution padded with same"),
        (changed(conv2=nn.LazyConv2d(16, 3)), "LazyConv2d as a convolution"),
        (changed(downsample=nn.Conv2d(64, 64, 1)), "a downsample path that is not one convolution and its norm"),
    ],
)
def test_what_can_not_be_fused_is_left_alone_with_a_reason(net: nn.Sequential, words: str) -> None:
    model = nn.ModuleDict({"stage": net})
    assert BottleneckSurgery(model).apply() == []
    reason = BottleneckPatches().why_no_site(model)
    assert reason.startswith("ModuleDict has ")
    assert words in reason


def test_basic_blocks_are_left_to_others() -> None:
    assert BottleneckSurgery(tiny_resnet(block=BasicBlock)).apply() == []
