"""bottleneck against its reference in float64, in both tiers; what autograd may ask of it; and where it is put."""

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.ops import FrozenBatchNorm2d

from fasttrain.callbacks.bottleneck import (
    BottleneckOptimization,
    BottleneckPatches,
    BottleneckSurgery,
    FusedStage,
    fused_stage,
    in_torch,
    stage_function,
)
from fasttrain.callbacks.bottleneck import convolution as convolution_module
from fasttrain.callbacks.bottleneck import stage as stage_module
from fasttrain.callbacks.bottleneck import weight_gradients as weight_gradients_module
from fasttrain.callbacks.bottleneck.constants import Constants
from fasttrain.callbacks.bottleneck.operators import Geometry
from fasttrain.callbacks.bottleneck.reference import GRADIENT_TOLERANCE, TOLERANCE, off, reference
from fasttrain.callbacks.bottleneck.stage import twin
from fasttrain.callbacks.frozen_bn import FrozenBNSurgery
from fasttrain.environment import Hardware
from fasttrain.errors import OptimizationError
from fasttrain.optimization import Change

pytest.importorskip("triton")
from fasttrain.callbacks.bottleneck import in_triton
from fasttrain.callbacks.bottleneck.kernel import INTERPRETED

DEVICE = "cpu" if INTERPRETED.value else "cuda"
CPU = Hardware("cpu", "cpu", "a CPU", 2)
LAST = torch.channels_last
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


def rounding_decides(net: nn.Sequential, x: Tensor) -> bool:
    """Whether one element that passes a ReLU on one side alone would be seen in a norm, and one is near enough to 0.

    Of n elements that pass, one is 1 / sqrt(n) of their gradient's norm.
    """
    exact, inputs = reference(net), []
    for block in exact:
        block.relu.register_forward_pre_hook(lambda module, given: inputs.append(given[0].detach().clone()))
    exact(x.double())
    near = torch.finfo(x.dtype).eps * 4
    return any(
        bool((value.abs() <= near * value.abs().max()).any()) and (value > 0).sum() < GRADIENT_TOLERANCE[x.dtype] ** -2
        for value in inputs
        if value.numel()
    )


# Back through 1x1 convolutions --------------------------------------------------------------------------------------


def pixels(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return feature_map(shape, dtype), feature_map(shape, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    height=st.integers(1, 7), width=st.integers(1, 7), depth=st.sampled_from([16, 64]),
    columns=st.sampled_from([16, 48]), gate=st.booleans(), add=st.booleans(), programs=st.integers(1, 9),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_products_equal_float64(
    dtype: torch.dtype, height: int, width: int, depth: int, columns: int, gate: bool, add: bool, programs: int,
    seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    g = feature_map((1, depth, height, width), dtype)
    weight = (torch.randn(depth, columns, 1, 1, device=DEVICE) / depth**0.5).to(dtype)
    z, values = pixels((1, columns, height, width), dtype)
    tiling = in_triton.Tiling(rows=16, columns=32, programs=programs)
    found = in_triton.product(g, weight, values if gate else None, z if add else None, tiling)
    exact = nn.functional.conv_transpose2d(g.double(), weight.double()) + (z.double() if add else 0)
    assert_close(found, exact * (values > 0) if gate else exact, 1e-5 if dtype == torch.float32 else 1e-3)
    assert found.is_contiguous(memory_format=LAST)


@pytest.mark.parametrize("most", [0, 64], ids=["cudnn", "product"])
@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("step", [1, 2, 3, None])
def test_both_ways_back_equal_torch(step: int | None, gate: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(in_triton, "PRODUCT_DEPTH", most)
    monkeypatch.setattr(in_triton, "PRODUCT_COLUMNS", most)
    monkeypatch.setattr(in_triton, "PRODUCT_DTYPES", in_triton.DTYPES)
    g, values = feature_map((2, 16, 5, 7)), feature_map((2, 48, 5, 7)) if gate else None
    small = feature_map((2, 48, -(-5 // step), -(-7 // step))) if step else None
    weight = torch.randn(16, 48, 1, 1, device=DEVICE)
    found, wanted = (tier.pointwise_backward(g, weight, values, small, step or 1) for tier in (in_triton, in_torch))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert found.is_contiguous(memory_format=LAST)


@pytest.mark.parametrize("channels", [1, 24, 300])
def test_a_small_map_is_added_at_every_step(channels: int) -> None:
    y, small = feature_map((2, channels, 5, 4)), feature_map((2, channels, 3, 2))
    wanted = y.clone()
    wanted[..., ::2, ::2] += small
    in_triton.add_at_every(y, small, 2)
    assert torch.equal(y, wanted)


@pytest.mark.parametrize(
    ("depth", "columns", "dtype", "taken"),
    [
        (64, 256, torch.bfloat16, True),
        (256, 64, torch.float16, True),
        (64, 256, torch.float32, False),
        (96, 64, torch.float16, False),
        (8, 64, torch.float16, False),
        (64, 40, torch.float16, False),
        (128, 512, torch.float16, False),
        (512, 128, torch.float16, False),
    ],
)
def test_products_are_for_few_channels(depth: int, columns: int, dtype: torch.dtype, taken: bool) -> None:
    g, weight = torch.empty(1, depth, 2, 2, dtype=dtype), torch.empty(depth, columns, 1, 1, dtype=dtype)
    assert in_triton.takes_product(g, weight) == taken


@pytest.mark.parametrize("with_other", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
@both_tiers
def test_gates(tier: str, in_place: bool, with_other: bool) -> None:
    g, other, values = (feature_map((2, 16, 3, 5)) for _ in range(3))
    total = g + other if with_other else g.clone()
    mine = g.clone(memory_format=torch.preserve_format)
    gated = in_torch.gated if tier == "torch" else partial(in_triton.gated, elements=128)
    found = gated(mine, values, other if with_other else None, in_place)
    assert torch.equal(found, total * (values > 0))
    if tier == "triton":
        assert (found.data_ptr() == mine.data_ptr()) == in_place
        assert torch.equal(in_triton.gated(g, None, other, False), g + other)


@pytest.mark.parametrize("formats", ["last", "first", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@both_tiers
def test_weights_are_scaled_by_output_channel(tier: str, dtype: torch.dtype, formats: str) -> None:
    weight, factors = torch.randn(24, 5, 3, 3, device=DEVICE), torch.rand(24, device=DEVICE)
    weight = weight.contiguous(memory_format=torch.contiguous_format if formats == "first" else LAST)
    out = torch.full_like(weight, torch.nan, dtype=dtype, memory_format=torch.contiguous_format)
    if formats == "last":
        out = out.contiguous(memory_format=LAST)
    (in_torch if tier == "torch" else in_triton).scale(weight, factors, out)
    assert torch.equal(out, (weight * factors.view(-1, 1, 1, 1)).to(dtype))


# Forward -------------------------------------------------------------------------------------------------------------


class Refusing:
    """Stands for cuDNN's fused operators: refuses, and counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, *_: Any) -> Tensor:
        self.asked += 1
        raise RuntimeError("FIND was unable to find an engine to execute this computation")


@pytest.mark.parametrize("with_add", [True, False])
def test_what_cudnn_refuses_is_computed_in_steps_and_not_asked_again(
    with_add: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = Refusing()
    monkeypatch.setattr(torch, "cudnn_convolution_add_relu" if with_add else "cudnn_convolution_relu", refusing)
    monkeypatch.setattr(convolution_module, "_is_for_cudnn", lambda *_: True)
    monkeypatch.setattr(convolution_module, "_refused", set())
    x, weight, bias = feature_map((1, 4, 3, 3)), torch.randn(4, 4, 1, 1, device=DEVICE), torch.randn(4, device=DEVICE)
    add = feature_map((1, 4, 3, 3)) if with_add else None
    wanted = nn.functional.conv2d(x, weight, bias)
    wanted = (wanted if add is None else wanted + add).relu()
    for _ in range(2):
        torch.testing.assert_close(convolution_module.convolution(x, weight, bias, Geometry(), add), wanted)
    assert refusing.asked == 1


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
    x = feature_map((batch, channels, height, width), dtype, layout)
    assume(not rounding_decides(net, x))
    assert_equals_reference(net, x, "torch")


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
@pytest.mark.parametrize("most", [16, 64], ids=["cudnn", "product"])
def test_stages_through_the_kernels_equal_the_reference(
    most: int, dtype: torch.dtype, options: dict[str, Any], shape: tuple[int, ...], layout: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    monkeypatch.setattr(in_triton, "PRODUCT_DEPTH", most)
    monkeypatch.setattr(in_triton, "PRODUCT_COLUMNS", most)
    monkeypatch.setattr(in_triton, "PRODUCT_DTYPES", in_triton.DTYPES)
    assert_equals_reference(stage(**options), feature_map(shape, dtype, layout), "triton")


def test_float64_is_differentiated_rightly() -> None:
    torch.manual_seed(0)
    net = fused(stage(4, 2, stride=2)).double()
    x = torch.randn(1, 4, 3, 3, dtype=torch.float64, device=DEVICE, requires_grad=True)
    weights = [parameter for name, parameter in net.named_parameters() if "0." in name]
    assert torch.autograd.gradcheck(lambda x, *_: net(x), (x, *weights))


def counted(call: Any, calls: list[str]) -> Any:
    return lambda *a: calls.append(call.__name__) or call(*a)  # type: ignore[func-returns-value]


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
    computed: list[str] = []
    for module, name in (
        (in_torch, "pointwise_backward"),
        (stage_function, "data_gradient"),
        (weight_gradients_module, "weight_gradient"),
    ):
        monkeypatch.setattr(module, name, counted(getattr(module, name), computed))
    fused(plain, "torch")(x).sum().backward()
    assert len(computed) - computed.count("weight_gradient") == data_gradients
    assert computed.count("weight_gradient") == weight_gradients
    for found, exact in zip((x, *plain.parameters()), wanted, strict=True):
        assert (found.grad is None) == (exact is None)
        if exact is not None:
            torch.testing.assert_close(found.grad, exact, rtol=1e-4, atol=1e-5)


def test_a_frozen_stage_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = fused(stage().requires_grad_(False), "torch"), feature_map((1, 16, 2, 2))
    kept: list[Any] = []
    run = stage_function.run
    monkeypatch.setattr(stage_module, "run", lambda *a: kept.append(run(*a)) or kept[-1])  # type: ignore[func-returns-value]
    y = net(x)
    assert y.grad_fn is None
    assert kept.pop()[1] == []
    net.requires_grad_()
    with torch.no_grad():
        assert net(x).grad_fn is None
    with torch.inference_mode():
        net(x)
    assert [blocks for _, blocks in kept] == [[], []]
    assert net(x).grad_fn is not None, "what was folded in inference mode serves training too"


def test_nothing_is_kept_but_maps_and_weights() -> None:
    net, x = fused(stage(), "triton"), feature_map((1, 16, 4, 4))
    y = net(x)
    node: Any = y.grad_fn
    kept = {tensor.data_ptr(): tensor for tensor in node.saved_tensors}
    maps = [tensor.shape[1] for tensor in kept.values() if tensor.shape[2:] == (4, 4)]
    assert sorted(maps) == [16, 16, 16, 16, 16, 64, 64], "x, two within each block, and the output of each"
    assert y.data_ptr() in kept


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
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # as after a plain block
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
