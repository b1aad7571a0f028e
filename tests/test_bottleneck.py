"""bottleneck's stages against the reference in float64, in both tiers, and what autograd may ask of them."""

from typing import Any

import pytest
import torch
from bottleneck_stages import (
    DEVICE,
    LAST,
    assert_close,
    assert_equals_reference,
    both_tiers,
    feature_map,
    fused,
    gradients,
    rounding_decides,
    stage,
)
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fasttrain.callbacks.bottleneck import (
    BottleneckSurgery,
    in_torch,
    in_triton,
    stage_function,
)
from fasttrain.callbacks.bottleneck import stage as stage_module
from fasttrain.callbacks.bottleneck import weight_gradients as weight_gradients_module
from fasttrain.callbacks.bottleneck.reference import GRADIENT_TOLERANCE, TOLERANCE, off, reference
from fasttrain.callbacks.bottleneck.stage import twin
from fasttrain.errors import OptimizationError


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
