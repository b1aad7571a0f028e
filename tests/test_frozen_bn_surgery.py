"""Models with frozen_bn in them: the same numbers and names, through the kernels too, undone, saved and compiled."""

import copy
import io
from typing import Any

import pytest
import torch
from frozen_norms import DEVICE, assert_close, eval_norm, frozen_norm, randomized, run, tiny_resnet
from torch import Tensor, nn
from torchvision.models.detection.backbone_utils import IntermediateLayerGetter
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.ops import FrozenBatchNorm2d

from fasttrain.callbacks.frozen_bn import (
    FrozenBNSurgery,
)
from fasttrain.optimization import Change
from fasttrain.recipes.retinanet.backbone import build_backbone


def models() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    eval_batch_norm = tiny_resnet(BasicBlock, nn.BatchNorm2d).eval()
    for module in eval_batch_norm.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    return {
        "bottlenecks": tiny_resnet(),
        "basic blocks in eval mode": eval_batch_norm,
        "recipe": randomized(build_backbone("small", (3, 4, 5), 8, True, 3)),
        "torchvision detection": IntermediateLayerGetter(tiny_resnet(), {"layer2": "0", "layer4": "1"}),
        "sequence": nn.Sequential(nn.Conv2d(3, 4, 3), frozen_norm(4), nn.ReLU(), nn.Conv2d(4, 2, 1)),
    }


@pytest.mark.parametrize("name", models())
def test_surgery_keeps_numbers_and_names_and_can_be_undone(name: str) -> None:
    model, images = models()[name], torch.randn(2, 3, 32, 32)
    names, types = list(model.state_dict()), {path: type(m) for path, m in model.named_modules()}
    parameters = list(model.parameters())
    before = run(model, images)
    surgery = FrozenBNSurgery(model)
    changes = surgery.apply()
    assert [change.path for change in changes] == [path for path in dict(model.named_modules()) if fused(model, path)]
    assert FrozenBNSurgery(model).apply() == [], "a second time there is nothing left"
    after = run(model, images)
    torch.testing.assert_close(after[0], before[0], rtol=1e-4, atol=1e-6)
    assert after[1].keys() == before[1].keys()
    for key, gradient in after[1].items():
        assert_close(gradient, before[1][key].double(), 1e-5)
    assert list(model.state_dict()) == names
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert torch.equal(run(copy.deepcopy(model), images)[0], after[0])
    surgery.undo()
    assert {path: type(m) for path, m in model.named_modules()} == types
    again = run(model, images)
    assert torch.equal(again[0], before[0])
    assert all(torch.equal(gradient, before[1][key]) for key, gradient in again[1].items())


def fused(model: nn.Module, path: str) -> bool:
    return type(model.get_submodule(path)).__module__.endswith("frozen_bn.modules")


def test_every_normalization_of_a_backbone_is_reached() -> None:
    model = models()["recipe"]
    changes = FrozenBNSurgery(model).apply()
    assert changes == [
        Change("body.bn1", "FrozenBatchNormReLU"),
        *(Change(f"body.layer{i}.0", "FusedBasicBlock") for i in range(1, 5)),
    ]
    assert isinstance(model.body.relu, nn.Identity)  # type: ignore[union-attr]

    def stop(*_: Any) -> None:
        raise AssertionError("a normalization was called by itself")

    for module in model.modules():
        if type(module) is FrozenBatchNorm2d:
            module.register_forward_hook(stop)
    model(torch.randn(1, 3, 32, 32))


def through_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fasttrain.callbacks.frozen_bn.fused._takes_triton", lambda *_: True)


@pytest.mark.parametrize("block", [Bottleneck, BasicBlock])
def test_blocks_through_the_kernels(monkeypatch: pytest.MonkeyPatch, block: Any) -> None:
    torch.manual_seed(0)
    width = 2 * block.expansion
    shortcut = nn.Sequential(nn.Conv2d(3, width, 1, stride=2), frozen_norm(width))
    net = nn.Sequential(
        block(3, 2, stride=2, downsample=shortcut, norm_layer=frozen_norm), block(width, 2, norm_layer=frozen_norm)
    ).to(DEVICE)
    images = torch.randn(2, 3, 5, 5, device=DEVICE)
    wanted = run(net, images)
    FrozenBNSurgery(net).apply()
    through_the_kernels(monkeypatch)
    found = run(net, images)
    assert_close(found[0], wanted[0].double(), 1e-5)
    for key, gradient in found[1].items():
        assert_close(gradient, wanted[1][key].double(), 1e-5)


def test_a_block_with_a_hook_gives_the_whole_gradient_of_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(BasicBlock(4, 4, norm_layer=frozen_norm) for _ in range(2))).to(DEVICE)
    kept: list[Tensor] = []
    x = torch.randn(1, 4, 3, 3, device=DEVICE)

    def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.retain_grad()
        kept.append(output)

    FrozenBNSurgery(net).apply()
    net[0].register_forward_hook(keep)
    run(net, x)
    through_the_kernels(monkeypatch)
    run(net, x)
    plain, ours_ = (output.grad for output in kept)
    assert plain is not None
    assert ours_ is not None
    torch.testing.assert_close(ours_, plain)


def test_a_downsample_path_without_a_frozen_norm_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(BasicBlock(3, 4, downsample=nn.Conv2d(3, 4, 1), norm_layer=frozen_norm)).to(DEVICE)
    x = torch.randn(1, 3, 3, 3, device=DEVICE)
    wanted = run(net, x)
    FrozenBNSurgery(net).apply()
    through_the_kernels(monkeypatch)
    torch.testing.assert_close(run(net, x), wanted)


def test_checkpoints_load_both_ways() -> None:
    plain, ours_ = tiny_resnet(), tiny_resnet()
    FrozenBNSurgery(ours_).apply()
    with torch.no_grad():
        for value in plain.state_dict().values():
            value.mul_(1.1)
    images = torch.randn(1, 3, 32, 32)
    ours_(images)
    file = io.BytesIO()
    torch.save(plain.state_dict(), file)
    file.seek(0)
    ours_.load_state_dict(torch.load(file))
    torch.testing.assert_close(ours_(images), plain(images), rtol=1e-4, atol=1e-5)
    tiny_resnet().load_state_dict(ours_.state_dict())


def test_torch_compile_takes_the_fused_modules_whole() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), frozen_norm(4), nn.ReLU(), Bottleneck(4, 1, norm_layer=frozen_norm),
                        eval_norm(4), nn.ReLU(),
                        BasicBlock(4, 4, norm_layer=frozen_norm))  # fmt: skip
    images = torch.randn(1, 3, 8, 8)
    FrozenBNSurgery(net).apply()
    wanted = run(net, images)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    found = run(compiled, images)
    torch.testing.assert_close(found[0], wanted[0])
    for one, other in zip(found[1].values(), wanted[1].values(), strict=True):
        torch.testing.assert_close(one, other)
