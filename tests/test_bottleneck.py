"""bottleneck against its reference in float64, in both tiers; what autograd may ask of it; and where it is put."""

import copy
import io
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.ops import FrozenBatchNorm2d

from fasttrain.callbacks.bottleneck import (
    BottleneckConfig,
    BottleneckOptimization,
    BottleneckPatches,
    BottleneckSurgery,
    FusedBottlenecks,
    FusedStage,
    fused_stage,
    in_torch,
)
from fasttrain.callbacks.bottleneck.constants import Constants
from fasttrain.callbacks.bottleneck.reference import GRADIENT_TOLERANCE, TOLERANCE, off, reference
from fasttrain.callbacks.bottleneck.stage import twin
from fasttrain.callbacks.frozen_bn import FrozenBNSurgery
from fasttrain.environment import Hardware
from fasttrain.errors import ConfigError, OptimizationError
from fasttrain.optimization import Applies, Change, Context, ExampleBatch, Refuses

pytest.importorskip("triton")
from fasttrain.callbacks.bottleneck import in_triton
from fasttrain.callbacks.bottleneck.kernel import INTERPRETED

DEVICE = "cpu" if INTERPRETED.value else "cuda"
CPU = Hardware("cpu", "cpu", "a CPU", 2)
LAST = torch.channels_last
SMALL = in_triton.Tiling(rows=16, columns=16, depth=16)
both_tiers = pytest.mark.parametrize("tier", ["torch", "triton"])


def randomized(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, (FrozenBatchNorm2d, nn.BatchNorm2d)):
            for name, low, high in (("running_var", 0.5, 2.0), ("weight", 0.5, 1.5), ("bias", -0.2, 0.2)):
                getattr(module, name).data.uniform_(low, high, generator=generator)
            module.running_mean.data.normal_(0, 0.1, generator=generator)  # type: ignore[union-attr, operator]
    return model


def eval_norm(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels).eval().requires_grad_(False)


def stage(
    channels: int = 16, width: int = 16, blocks: int = 2, stride: int = 1, downsample: bool = True, groups: int = 1,
    dilation: int = 1, norm: Any = FrozenBatchNorm2d,
) -> nn.Sequential:  # fmt: skip
    """A stage as torchvision's ResNet makes it; without a downsample path, channels are four times the width."""
    out = 4 * width
    options: dict[str, Any] = {"groups": groups, "base_width": 64 // groups, "norm_layer": norm, "dilation": dilation}
    path = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), norm(out)) if downsample else None
    first = Bottleneck(channels, width, stride, path, **options)
    net = nn.Sequential(first, *(Bottleneck(out, width, **options) for _ in range(blocks - 1)))
    return randomized(net).to(DEVICE)  # type: ignore[return-value]


def feature_map(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, layout: str = "last") -> Tensor:
    n, c, h, w = shape
    if layout == "strided":
        return torch.randn(n, c, h, 2 * w, device=DEVICE).to(dtype)[..., ::2]
    x = torch.randn(n, c, h, w, device=DEVICE).to(dtype)
    return x.contiguous(memory_format=LAST) if layout == "last" else x


def fused(plain: nn.Sequential, tier: Any = "auto") -> FusedStage:
    made = fused_stage(plain)
    made.tier = tier
    return made


def gradients(net: nn.Module, x: Tensor, dy: Tensor | None = None) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    net.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = net(x)
    y.backward(torch.ones_like(y) if dy is None else dy.to(y.dtype))
    assert x.grad is not None
    return y.detach(), x.grad, [parameter.grad for parameter in net.parameters()]


def assert_close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert found.shape == wanted.shape
    if wanted.numel():
        assert float((found.double() - wanted).abs().max()) <= tolerance * float(wanted.abs().max()) + 1e-7


def assert_equals_reference(net: nn.Sequential, x: Tensor, tier: Any) -> None:
    exact = reference(net)
    net.to(x.dtype)
    exact.load_state_dict(net.state_dict())  # of the rounded weights
    dy = torch.randn_like(exact(x.double()))
    found, wanted = gradients(fused(net, tier), x, dy), gradients(exact, x.double(), dy)
    assert found[0].dtype == x.dtype
    assert found[0].is_contiguous(memory_format=LAST)
    assert_close(found[0], wanted[0], TOLERANCE[x.dtype])
    for one, other in zip([found[1], *found[2]], [wanted[1], *wanted[2]], strict=True):
        assert one is not None
        assert other is not None
        assert one.dtype == x.dtype
        if x.numel():
            assert off(one, other) <= GRADIENT_TOLERANCE[x.dtype]


# Products ------------------------------------------------------------------------------------------------------------


def matrices(rows: int, depth: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    left, right = torch.randn(rows, depth, device=DEVICE), torch.randn(columns, depth, device=DEVICE)
    return left.to(dtype), (right / depth**0.5).to(dtype), torch.randn(columns, device=DEVICE)


def unpacked(bits: Tensor) -> Tensor:
    return ((bits[..., None] >> torch.arange(8, device=bits.device)) & 1).bool().flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("gate", ["none", "bits", "values"])
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.integers(1, 40), depth=st.sampled_from([16, 48]), columns=st.sampled_from([16, 80]), wide=st.booleans(),
    add=st.booleans(), relu=st.booleans(), early=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_products_equal_float64(
    dtype: torch.dtype, gate: str, rows: int, depth: int, columns: int, wide: bool, add: bool, relu: bool, early: bool,
    seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    left, right, bias = matrices(rows, depth, columns, dtype)
    z, values = (torch.randn(rows, columns, device=DEVICE).to(dtype) for _ in range(2))
    packed = torch.randint(0, 256, (rows, columns // 8), dtype=torch.uint8, device=DEVICE)
    y, bits = in_triton.product(
        left, right.t().contiguous() if wide else right, wide, bias=bias, add=z if add else None, relu=relu,
        keep_bits=relu, gate={"none": None, "bits": packed, "values": values}[gate],
        tiling=in_triton.Tiling(rows=16, columns=32, depth=16, early=early),
    )  # fmt: skip
    wanted = left.double() @ right.double().t() + bias.double() + (z.double() if add else 0)
    if relu:
        assert bits is not None
        certain = wanted.abs() > 1e-5
        assert torch.equal(unpacked(bits) & certain, (wanted > 0) & certain)
        wanted = wanted.relu()
    passed = {"none": None, "bits": unpacked(packed), "values": values > 0}[gate]
    assert_close(y, wanted if passed is None else wanted * passed, 1e-5 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_second_product_is_of_the_pixels_that_a_stride_looks_at(step: int) -> None:
    torch.manual_seed(step)
    x = feature_map((2, 16, 5, 7))
    small = feature_map((2, 32, -(-5 // step), -(-7 // step)))
    weight, other = torch.randn(16, 32, 1, 1, device=DEVICE), torch.randn(16, 16, 1, 1, device=DEVICE)
    one, two = torch.randn(2, 16, device=DEVICE)
    shortcut = in_triton.Shortcut(x, other, two, step)
    (y, bits), (wanted, _) = (
        tier.pointwise(small, weight, one, None, shortcut, True) for tier in (in_triton, in_torch)
    )
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-5)
    assert y.is_contiguous(memory_format=LAST)
    assert bits is not None
    assert bits.numel() == y.numel() // 8


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_what_is_added_lies_at_every_step_of_the_larger_map(
    step: int, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(step)
    monkeypatch.setattr(in_triton, "SHALLOW", in_triton.Tiling(rows=16, columns=16, depth=16, early=early))
    g, small = feature_map((2, 16, 5, 7)), feature_map((2, 32, -(-5 // step), -(-7 // step)))
    weight, values = torch.randn(16, 32, 1, 1, device=DEVICE), feature_map((2, 32, 5, 7))
    found, wanted = (tier.pointwise_backward(g, weight, values, small, step) for tier in (in_triton, in_torch))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("with_other", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_gates(with_other: bool, in_place: bool) -> None:
    g, other, values = (feature_map((2, 16, 3, 5)) for _ in range(3))
    passed = torch.randint(0, 2, (2 * 3 * 5, 16), device=DEVICE).bool()
    bits = (passed.view(-1, 2, 8) << torch.arange(8, device=DEVICE)).sum(2).to(torch.uint8)
    as_map = passed.view(2, 3, 5, 16).permute(0, 3, 1, 2)
    total = g + other if with_other else g.clone()
    for gate, wanted in ((bits, total * as_map), (values, total * (values > 0))):
        mine = g.clone(memory_format=torch.preserve_format)
        found = in_triton.gated(mine, gate, other if with_other else None, in_place, vectors=16)
        assert torch.equal(found, wanted)
        assert (found.data_ptr() == mine.data_ptr()) == in_place
    assert torch.equal(in_torch.gated(g.clone(), values, other if with_other else None, in_place), wanted)


# Stages --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    batch=st.integers(0, 2), channels=st.sampled_from([8, 16, 64]), stride=st.integers(1, 2), groups=st.integers(1, 2),
    dilation=st.integers(1, 2), height=st.integers(1, 6), width=st.integers(1, 6), blocks=st.integers(1, 3),
    layout=st.sampled_from(["last", "first", "strided"]), seed=st.integers(0, 99),
)  # fmt: skip
def test_stages_in_torch_equal_the_reference(
    dtype: torch.dtype, batch: int, channels: int, stride: int, groups: int, dilation: int, height: int, width: int,
    blocks: int, layout: str, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    net = stage(channels, 16, blocks, stride, channels != 64 or stride > 1, groups, dilation)
    assert_equals_reference(net, feature_map((batch, channels, height, width), dtype, layout), "torch")


@pytest.mark.parametrize(
    ("dtype", "options", "shape", "layout"),
    [
        (torch.float32, {"stride": 2}, (2, 16, 5, 3), "last"),
        (torch.float32, {"groups": 2, "blocks": 1}, (1, 16, 3, 2), "first"),
        (torch.float32, {"downsample": False, "channels": 64}, (1, 64, 2, 3), "strided"),
        (torch.float32, {"stride": 2, "channels": 32}, (0, 32, 4, 4), "last"),
        (torch.float32, {"channels": 24, "width": 8}, (1, 24, 2, 2), "last"),
        (torch.float32, {"stride": 2, "blocks": 1}, (2, 16, 1, 1), "first"),
        (torch.float16, {"stride": 2, "blocks": 3}, (2, 16, 3, 4), "last"),
    ],
    ids=["stride", "groups", "no downsample", "empty", "odd channels", "one pixel", "float16"],
)
def test_stages_through_the_kernels_equal_the_reference(
    dtype: torch.dtype, options: dict[str, Any], shape: tuple[int, ...], layout: str
) -> None:
    torch.manual_seed(0)
    assert_equals_reference(stage(**options), feature_map(shape, dtype, layout), "triton")


def test_float64_is_differentiated_rightly() -> None:
    torch.manual_seed(0)
    net = fused(stage(4, 2, stride=2)).double()
    x = torch.randn(1, 4, 3, 3, dtype=torch.float64, device=DEVICE, requires_grad=True)
    weights = [parameter for name, parameter in net.named_parameters() if "0." in name]
    assert torch.autograd.gradcheck(lambda x, *_: net(x), (x, *weights))


class Spy:
    """The torch tier, with a list of the gradients that were computed."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(in_torch, name)


@pytest.mark.parametrize(
    ("trained", "x_trains", "data_gradients", "weight_gradients"),
    [
        ([], True, 7, 0),
        (["0.conv1"], False, 5, 1),
        (["0.conv2"], False, 4, 1),
        (["0.conv3", "0.downsample"], False, 3, 2),
        (["1.conv1", "1.conv3"], False, 2, 2),
        (["1.conv3"], False, 0, 1),
        (["0.", "1."], False, 5, 7),
        (["0.", "1."], True, 7, 7),
    ],
)
def test_only_wanted_gradients_are_computed(
    trained: list[str], x_trains: bool, data_gradients: int, weight_gradients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    plain = stage()
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(name.startswith(tuple(trained)))
    x = feature_map((1, 16, 3, 3)).requires_grad_(x_trains)
    plain(x).sum().backward()
    wanted = [p.grad for p in (x, *plain.parameters())]
    x.grad = None
    plain.zero_grad()
    spy, computed = Spy(), []
    weight_gradient = in_torch.weight_gradient
    monkeypatch.setattr(
        "fasttrain.callbacks.bottleneck.weight_gradients.weight_gradient",
        lambda *a: computed.append(1) or weight_gradient(*a),  # type: ignore[func-returns-value]
    )
    monkeypatch.setattr(FusedStage, "_operators", lambda *_: spy)
    fused(plain)(x).sum().backward()
    assert sum(name in ("pointwise_backward", "spatial_backward") for name in spy.calls) == data_gradients
    assert len(computed) == weight_gradients
    for found, exact in zip((x, *plain.parameters()), wanted, strict=True):
        assert (found.grad is None) == (exact is None)
        if exact is not None:
            torch.testing.assert_close(found.grad, exact, rtol=1e-4, atol=1e-5)


def test_a_frozen_stage_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = fused(stage().requires_grad_(False), "triton"), feature_map((1, 16, 2, 2))
    kept = []
    pointwise = in_triton.pointwise
    monkeypatch.setattr(in_triton, "pointwise", lambda *a: kept.append(a[-1]) or pointwise(*a))  # type: ignore[func-returns-value]
    y = net(x)
    assert y.grad_fn is None
    assert not any(kept)
    net.requires_grad_()
    with torch.no_grad():
        assert net(x).grad_fn is None
    with torch.inference_mode():
        net(x)
    assert not any(kept)
    assert net(x).grad_fn is not None, "what was folded in inference mode serves training too"
    assert all(kept[-4:])


def test_gates_between_blocks_are_bits() -> None:
    net = fused(stage(), "triton")
    node: Any = net(feature_map((1, 16, 4, 4))).grad_fn
    sizes = [t.numel() for t in node.saved_tensors if t.dtype == torch.uint8]
    assert sizes == [16 * 16 // 8, 16 * 64 // 8] * 2


def test_a_second_derivative_is_refused() -> None:
    x = feature_map((1, 16, 2, 2)).requires_grad_()
    y = fused(stage())(x)
    with pytest.raises(OptimizationError, match=r"^bottleneck: a gradient that can be differentiated again .*plain"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@both_tiers
def test_a_second_backward_gives_the_same(tier: str) -> None:
    net, x = fused(stage(), tier), feature_map((1, 16, 2, 2)).requires_grad_()
    y = net(x)
    first = torch.autograd.grad(y.sum(), [x, *net.parameters()], retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(y.sum(), [x, *net.parameters()]), strict=True):
        assert torch.equal(one, other)


@both_tiers
@pytest.mark.parametrize("uses", ["both", "y", "twin"])
def test_the_gradients_of_an_output_and_its_twin_add_up(tier: str, uses: str) -> None:
    plain, x = stage(blocks=1), feature_map((1, 16, 2, 3)).requires_grad_()

    def loss(y: Tensor, other: Tensor) -> Tensor:
        parts = {"y": [y.square()], "twin": [other.sin()]}
        return sum(parts.get(uses, [y.square(), other.sin()])).sum()  # type: ignore[return-value, union-attr]

    y = fused(plain, tier)(x)
    assert twin(y) is not y
    assert twin(y).data_ptr() == y.data_ptr()
    found = torch.autograd.grad(loss(y, twin(y)), [x, *plain.parameters()])
    y = plain(x)
    assert twin(y) is y
    for one, other in zip(found, torch.autograd.grad(loss(y, y), [x, *plain.parameters()]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_twin_is_not_used_after_its_tensor_was_written_to() -> None:
    y = fused(stage(blocks=1), "triton")(feature_map((1, 16, 2, 2)))
    y.mul_(2)
    assert twin(y) is y
    y.sum().backward()


def test_two_stages_and_a_pyramid() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"layer1": stage(), "layer2": stage(64, 16, stride=2)})
    x = feature_map((1, 16, 4, 4))

    def step() -> list[Tensor]:
        features = [model["layer1"](x)]
        features.append(model["layer2"](features[0]))
        loss = sum((feature.square().sum() for feature in features), torch.zeros((), device=DEVICE))
        return list(torch.autograd.grad(loss, list(model.parameters())))

    wanted = step()
    assert len(BottleneckSurgery(model).apply()) == 2
    for found, exact in zip(step(), wanted, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-3)


def test_a_block_that_is_there_twice() -> None:
    block = stage(64, 16, 1, downsample=False)[0]
    plain, x = nn.Sequential(block, block), feature_map((1, 64, 2, 2))
    wanted = gradients(plain, x)
    for one, other in zip(gradients(fused(plain), x)[2], wanted[2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_stage_at_two_paths_stays_one() -> None:
    plain = stage()
    model = nn.ModuleDict({"a": plain, "b": nn.ModuleList([plain])})
    surgery = BottleneckSurgery(model)
    assert [change.path for change in surgery.apply()] == ["a", "b.0"]
    assert model["a"] is model["b"][0]  # type: ignore[index]
    surgery.undo()
    assert model["a"] is model["b"][0] is plain  # type: ignore[index]


def test_a_stage_used_twice() -> None:
    plain, x = stage(64, 16, downsample=False), feature_map((1, 64, 2, 2))
    wanted = gradients(nn.Sequential(plain, plain), x)
    both = fused(plain)
    for one, other in zip(gradients(nn.Sequential(both, both), x)[2], wanted[2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@both_tiers
def test_not_a_number_and_infinity_are_seen(tier: str) -> None:
    net = fused(stage(), tier)
    x = feature_map((1, 16, 2, 2))
    x[0, 0, 0, 0] = torch.nan
    assert net(x).isnan().any()
    y = net(feature_map((1, 16, 2, 2)))
    y.backward(torch.where(y > 0, 1.0, torch.inf))
    assert all(parameter.grad.isfinite().all() for parameter in net.parameters()), "of what a ReLU stopped it is 0"


def test_under_autocast() -> None:
    plain = stage()
    net, x = fused(plain), feature_map((2, 16, 4, 4)).requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16):
        y = net(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    exact = gradients(reference(plain), x.double())
    assert_close(y.detach(), exact[0], TOLERANCE[torch.bfloat16])
    for parameter, wanted in zip(plain.parameters(), exact[2], strict=True):
        assert parameter.grad is not None
        assert wanted is not None
        assert parameter.grad.dtype == torch.float32
        assert off(parameter.grad, wanted) < GRADIENT_TOLERANCE[torch.bfloat16]


def test_what_the_blocks_would_refuse_they_refuse() -> None:
    plain = stage()
    for x in (torch.randn(1, 16, 2, 2, dtype=torch.float64), torch.randn(1, 16, 2, 2).long(), torch.randn(16, 16)):
        with pytest.raises((RuntimeError, ValueError)) as wanted:
            plain(x.to(DEVICE))
        with pytest.raises((RuntimeError, ValueError)) as found:
            fused(plain)(x.to(DEVICE))
        assert str(found.value) == str(wanted.value)


def test_gradients_have_the_layout_of_their_weights() -> None:
    for memory_format in (torch.contiguous_format, LAST):
        net = fused(stage()).to(memory_format=memory_format)  # type: ignore[call-overload]
        for parameter in net.parameters():
            net(feature_map((1, 16, 2, 2))).sum().backward()
            assert parameter.grad is not None
            assert parameter.grad.stride() == parameter.stride()


# Constants -----------------------------------------------------------------------------------------------------------


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


# Surgery -------------------------------------------------------------------------------------------------------------


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


# Doors ---------------------------------------------------------------------------------------------------------------


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 16, 3), stage().cpu(), nn.Flatten(), nn.Linear(64 * 4, 2))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).square().mean()
        self.losses.append(float(loss.detach()))
        return loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        return DataLoader(TensorDataset(torch.randn(4, 3, 4, 4, generator=generator)), batch_size=2)


def trained(*callbacks: pl.Callback) -> Classifier:
    torch.manual_seed(0)
    module = Classifier()
    pl.Trainer(
        accelerator="cpu", callbacks=list(callbacks), logger=False, max_epochs=2, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    ).fit(module, datamodule=Data())  # fmt: skip
    return module


def test_the_callback_trains_the_same_and_can_be_undone() -> None:
    callback = FusedBottlenecks()
    plain, ours = trained(), trained(callback)
    assert ours.losses == pytest.approx(plain.losses, rel=1e-4)
    assert ours.losses[-1] != ours.losses[0]
    assert callback.changes == [Change("net.1", "FusedStage")]
    callback.undo()
    assert type(ours.net[1]) is nn.Sequential
    with pytest.raises(OptimizationError, match=r"^bottleneck: Linear has no nn\.Sequential .*; leave it out\.$"):
        callback.setup(None, nn.Linear(1, 1), "fit")  # type: ignore[arg-type]


def test_the_plan_measures_or_trusts() -> None:
    context = Context(Classifier(), Data(), CPU, example=ExampleBatch(Data()))
    assert isinstance(BottleneckOptimization(BottleneckConfig(least_gain=1.0)).check(context), Refuses)
    trusting = BottleneckOptimization(BottleneckConfig(measure=False, side_streams=3))
    verdict = trusting.check(context)
    assert isinstance(verdict, Applies)
    assert verdict.note == "1 sites; not measured, as asked; made for channels_last, which is not asked for"
    assert type(context.module.net[1]) is nn.Sequential  # type: ignore[index, union-attr]
    (callback,) = trusting.attach(context).callbacks
    assert callback.patches.side_streams == 3  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"^optimizations\.bottleneck\.side_streams is .* 0 or more; this is -1\.$"):
        BottleneckConfig(side_streams=-1)
