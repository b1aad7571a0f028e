"""Where conv_bias_relu goes in a model, what stays the same there, and its two doors."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops.misc import Conv2dNormActivation

from fasttrain.callbacks.conv_bias_relu import (
    ConvBiasReLUPatches,
)
from fasttrain.environment import Hardware
from fasttrain.optimization import Change
from fasttrain.patches import PatchSurgery
from fasttrain.recipes.retinanet.head import Head

pytest.importorskip("triton")

CPU = Hardware("cpu", "cpu", "a CPU", 2)
LAST = torch.channels_last


def patched(model: nn.Module) -> list[Change]:
    return PatchSurgery(model, ConvBiasReLUPatches()).apply()


def through_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fasttrain.callbacks.conv_bias_relu.conv.tier_for", lambda *_: "triton")


def run(model: nn.Module, *inputs: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
    model.zero_grad()
    outputs: list[Tensor] = []
    for x in inputs:
        y = model(x)
        outputs += [y] if isinstance(y, Tensor) else y
    torch.stack([y.square().mean() for y in outputs]).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return [y.detach() for y in outputs], gradients


def retinanet_head() -> Head:
    torch.manual_seed(0)
    head = Head(8, 2, False, 3, 5)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.1)
    return head


def test_the_heads_of_retinanet_shared_by_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    head = retinanet_head()
    names, parameters = list(head.state_dict()), list(head.parameters())
    types = {path: type(m) for path, m in head.named_modules()}
    levels = [torch.randn(2, 8, side, side).to(memory_format=LAST) for side in (6, 3, 1)]
    before = run(head, *levels)
    surgery = PatchSurgery(head, ConvBiasReLUPatches())
    assert surgery.apply() == [
        Change("classification_head.cls_logits", "ConvBias"),
        Change("classification_head.conv.0.0", "ConvBiasReLU"),
        Change("classification_head.conv.1.0", "ConvBiasReLU"),
        Change("regression_head.bbox_reg", "ConvBias"),
        Change("regression_head.conv.0.0", "ConvBiasReLU"),
        Change("regression_head.conv.1.0", "ConvBiasReLU"),
    ]
    assert patched(head) == [], "a second time there is nothing left"
    assert list(head.state_dict()) == names
    assert all(one is other for one, other in zip(head.parameters(), parameters, strict=True))
    with monkeypatch.context() as patch:
        through_the_kernels(patch)
        after = run(head, *levels)
        torch.testing.assert_close(run(copy.deepcopy(head), *levels), after)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-6)
    surgery.undo()
    assert {path: type(m) for path, m in head.named_modules()} == types
    torch.testing.assert_close(run(head, *levels), before, rtol=0, atol=0)


class OwnForward(nn.Module):
    """A forward that only a trace can read."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.first, self.second = nn.ReLU(inplace=True), nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.first(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (RPNHead(8, 3), {"conv.0.0": "ConvBiasReLU", "cls_logits": "ConvBias", "bbox_pred": "ConvBias"}),
        (OwnForward(), {"first": "ConvBiasReLU", "second": "ConvBias"}),
        (Conv2dNormActivation(3, 4, norm_layer=None), {"0": "ConvBiasReLU"}),
        (nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(), nn.Conv2d(4, 4, 1)), {"2": "ConvBias"}),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.LeakyReLU()), {"0": "ConvBias"}),
        (nn.Sequential(nn.Conv2d(3, 4, 3, padding="same"), nn.ReLU()), {"0": "ConvBiasReLU"}),
        (nn.Sequential(nn.Conv2d(3, 4, (5, 3), padding="same", dilation=(1, 2)), nn.ReLU()), {"0": "ConvBiasReLU"}),
        (nn.Sequential(nn.Conv2d(3, 4, 3, padding="valid", stride=2)), {"0": "ConvBias"}),
    ],
)
def test_where_it_goes(monkeypatch: pytest.MonkeyPatch, model: nn.Module, wanted: dict[str, str]) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8 if isinstance(model, RPNHead) else 3, 7, 7)

    def outputs() -> list[Tensor]:
        found = model([x]) if isinstance(model, RPNHead) else model(x)
        return [t for part in found for t in part] if isinstance(found, tuple) else [found]

    before = outputs()
    for site in ConvBiasReLUPatches().sites(model):
        if site.passed_by:
            torch.testing.assert_close(site.fused()(x), site.plain(x))
    assert {change.path: change.what for change in patched(model)} == wanted
    through_the_kernels(monkeypatch)
    torch.testing.assert_close(outputs(), before, rtol=1e-4, atol=1e-6)


def with_hook(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


class OwnConv(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return input


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.Linear(3, 3), "Sequential has no Conv2d whose bias could be fused"),
        (nn.Conv2d(3, 3, 1, bias=False), "its convolutions are: 1 without bias"),
        (nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect"), "1 with padding_mode='reflect'"),
        (nn.Conv2d(3, 3, 2, padding="same"), "1 with padding='same' and a kernel of even size"),
        (OwnConv(3, 3, 1), "1 of the class OwnConv, which may compute otherwise"),
        (with_hook(nn.Conv2d(3, 3, 1)), "1 watched by hooks"),
    ],
)
def test_what_can_not_be_fused_is_left_alone_with_a_reason(layer: nn.Module, words: str) -> None:
    model = nn.Sequential(layer, nn.ReLU())
    assert patched(model) == []
    assert words in ConvBiasReLUPatches().why_no_site(model)
    assert type(model[1]) is nn.ReLU


def test_a_relu_with_a_hook_stays_and_sees_its_input() -> None:
    seen: list[Tensor] = []
    relu = nn.ReLU()
    relu.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    model = nn.Sequential(nn.Conv2d(3, 3, 1), relu)
    assert patched(model) == [Change("0", "ConvBias")]
    model(torch.randn(1, 3, 2, 2))
    assert float(seen[0].detach().min()) < 0


def test_a_convolution_at_places_with_and_without_a_relu_is_left_alone() -> None:
    conv = nn.Conv2d(3, 3, 1)
    model = nn.Sequential(conv, nn.ReLU(), conv)
    assert patched(model) == []
    assert "1 followed by a ReLU at one of its places only" in ConvBiasReLUPatches().why_no_site(model)
    both = nn.ModuleList([nn.Sequential(conv, nn.ReLU()), nn.Sequential(conv, nn.ReLU())])
    assert patched(both) == [Change("0.0", "ConvBiasReLU"), Change("1.0", "ConvBiasReLU")]
    assert both[0][0] is both[1][0]  # type: ignore[index]


def test_checkpoints_load_both_ways() -> None:
    plain, ours = retinanet_head(), retinanet_head()
    patched(ours)
    with torch.no_grad():
        for value in plain.state_dict().values():
            value.mul_(1.1)
    file = io.BytesIO()
    torch.save(plain.state_dict(), file)
    file.seek(0)
    ours.load_state_dict(torch.load(file))
    x = torch.randn(1, 8, 4, 4)
    torch.testing.assert_close(ours(x), plain(x))
    retinanet_head().load_state_dict(ours.state_dict())


def test_torch_compile_takes_the_fused_modules_whole() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)), torch.randn(1, 3, 4, 4)
    wanted = run(net, x)
    assert len(patched(net)) == 2
    torch.testing.assert_close(run(torch.compile(net, backend="aot_eager", fullgraph=True), x)[0], wanted[0])
