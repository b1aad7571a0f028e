"""bottleneck on a GPU: both ways back at real sizes, stages by dtype, streams, a captured graph, backbones."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchvision.models import resnet
from torchvision.models.resnet import Bottleneck
from torchvision.ops import FrozenBatchNorm2d

from fasttrain.callbacks.bottleneck import BottleneckSurgery, FusedStage, fused_stage
from fasttrain.callbacks.bottleneck.convolution import convolution
from fasttrain.callbacks.bottleneck.operators import Geometry
from fasttrain.callbacks.bottleneck.reference import GRADIENT_TOLERANCE, off, reference
from fasttrain.callbacks.frozen_bn import FrozenBNSurgery
from fasttrain.measure import captured

pytestmark = pytest.mark.gpu

LAST = torch.channels_last
# With the share of the largest value that one rounding of the operands' and results' dtype may cost.
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ROUNDING = {"fp32": 1e-5, "tf32": 2e-3, "fp16": 1e-3, "bf16": 8e-3}
every_dtype = pytest.mark.parametrize("precision", DTYPES)


@pytest.fixture(autouse=True)
def _compiled_kernels() -> None:
    kernel = pytest.importorskip("fasttrain.callbacks.bottleneck.kernel")
    if kernel.INTERPRETED.value:
        pytest.skip("Triton interprets here; set TRITON_INTERPRET=0")


@pytest.fixture(autouse=True)
def _tf32(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    precision = getattr(request.node, "callspec", None)
    allowed = precision is not None and precision.params.get("precision") == "tf32"
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)


def feature_map(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=LAST)


def randomized(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, FrozenBatchNorm2d):
            module.weight.uniform_(0.4, 1.0)
            module.bias.normal_(0, 0.1)
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    return model.cuda().to(memory_format=LAST)


def stage(channels: int, width: int, blocks: int, stride: int = 1, groups: int = 1) -> Any:
    torch.manual_seed(0)
    out = 4 * width
    options: dict[str, Any] = {"groups": groups, "base_width": 64 // groups, "norm_layer": FrozenBatchNorm2d}
    path = None
    if stride > 1 or channels != out:
        path = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), FrozenBatchNorm2d(out))
    first = Bottleneck(channels, width, stride, path, **options)
    return randomized(nn.Sequential(first, *(Bottleneck(out, width, **options) for _ in range(blocks - 1))))


def assert_close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert float((found.double() - wanted).abs().max()) <= tolerance * float(wanted.abs().max()) + 1e-7


def products(
    shape: tuple[int, int, int], depth: int, columns: int, precision: str
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return gradient, weight, gate and residual of a 1x1 convolution of (n, height, width), and its input's gradient.

    The last is float64, without gate and residual.
    """
    n, *sides = shape
    g, gate, add = (feature_map((n, size, *sides), DTYPES[precision]) for size in (depth, columns, columns))
    weight = (torch.randn(depth, columns, 1, 1, device="cuda") / depth**0.5).to(DTYPES[precision])
    exact = torch.tensordot(g.double().permute(0, 2, 3, 1), weight.double()[..., 0, 0], 1).permute(0, 3, 1, 2)
    return (g, weight.to(memory_format=LAST), gate, add), exact


def assert_all_ways_back_equal_float64(
    shape: tuple[int, int, int], depth: int, columns: int, precision: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fasttrain.callbacks.bottleneck import in_triton

    monkeypatch.setattr(in_triton, "PRODUCT_DEPTH", most)
    monkeypatch.setattr(in_triton, "PRODUCT_COLUMNS", most)
    (g, weight, gate, add), exact = products(shape, depth, columns, precision)
    tolerance = 2 * ROUNDING[precision]  # cuDNN's result is rounded, and what is added to it again
    both = exact + add.double()
    for one, other, wanted in ((gate, None, exact * (gate > 0)), (gate, add, both * (gate > 0)), (None, add, both)):
        found = in_triton.pointwise_backward(g, weight, one, other, 1)
        assert found.is_contiguous(memory_format=LAST)
        assert_close(found, wanted, tolerance)
    small = add[..., ::2, ::2].contiguous(memory_format=LAST)
    exact[..., ::2, ::2] += small
    assert_close(in_triton.pointwise_backward(g, weight, None, small, 2), exact, tolerance)
    assert_close(in_triton.pointwise_backward(g, weight, gate, small, 2), exact * (gate > 0), tolerance)


@every_dtype
@pytest.mark.parametrize("most", [0, 4096], ids=["cudnn", "product"])
@pytest.mark.parametrize(
    ("shape", "depth", "columns"),
    [((2, 200, 200), 64, 256), ((2, 200, 200), 256, 64), ((2, 101, 100), 128, 256), ((4, 25, 25), 512, 2048)],
)
def test_back_through_1x1_convolutions_of_real_sizes(
    shape: tuple[int, int, int], depth: int, columns: int, most: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if most and depth > 256:
        pytest.skip("a product holds all weights of a tile's columns in shared memory")
    torch.manual_seed(0)
    assert_all_ways_back_equal_float64(shape, depth, columns, precision, most, monkeypatch)


@every_dtype
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.integers(1, 3), height=st.integers(1, 40), width=st.integers(1, 40), depth=st.sampled_from([16, 64, 96, 256]),
    columns=st.sampled_from([16, 96, 192, 256]), seed=st.integers(0, 99),
)  # fmt: skip
def test_back_through_1x1_convolutions_of_random_sizes(
    precision: str, n: int, height: int, width: int, depth: int, columns: int, seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    assert_all_ways_back_equal_float64((n, height, width), depth, columns, precision, 256, monkeypatch)


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("programs", [1, 7, 396, 1 << 20])
def test_products_in_any_tiling(rows: int, programs: int) -> None:
    from fasttrain.callbacks.bottleneck import in_triton

    (g, weight, gate, add), exact = products((1, 61, 67), 64, 256, "fp16")
    tiling = in_triton.Tiling(rows=rows, columns=128, programs=programs)
    assert_close(in_triton.product(g, weight, gate, add, tiling), (exact + add.double()) * (gate > 0), ROUNDING["fp16"])


@every_dtype
@pytest.mark.parametrize(("channels", "groups", "stride"), [(64, 1, 1), (128, 32, 2), (24, 1, 1)])
def test_forward_convolutions_are_as_good_as_pytorchs(channels: int, groups: int, stride: int, precision: str) -> None:
    dtype = DTYPES[precision]
    x = feature_map((2, channels, 33, 31), dtype)
    weight = (torch.randn(channels, channels // groups, 3, 3, device="cuda") / (3 * channels / groups) ** 0.5).to(dtype)
    bias = torch.randn(channels, device="cuda", dtype=dtype)
    geometry = Geometry((stride, stride), (1, 1), (1, 1), groups)
    exact = nn.functional.conv2d(x.double(), weight.double(), bias.double(), *geometry)
    add = torch.randn_like(exact).to(dtype).contiguous(memory_format=LAST)
    weight = weight.to(memory_format=LAST)
    assert_close(convolution(x, weight, bias, geometry), exact.relu(), 2 * ROUNDING[precision])
    found = convolution(x, weight, bias, geometry, add)
    assert found.is_contiguous(memory_format=LAST)
    assert_close(found, (exact + add.double()).relu(), 2 * ROUNDING[precision])


def results(net: nn.Module, x: Tensor, dy: Tensor, dtype: torch.dtype | None) -> list[Tensor]:
    """The output, and the gradients of x and of all weights."""
    net.zero_grad(set_to_none=True)
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=False):
        y = net(x)
    y.backward(dy.to(y.dtype))
    found = [y.detach(), x.grad, *(parameter.grad for parameter in net.parameters())]
    assert all(each is not None for each in found)
    return found  # type: ignore[return-value]


def assert_as_good(found: list[Tensor], plain: list[Tensor], wanted: list[Tensor], chance: float) -> None:
    """Relative norms, beside those of the plain model, whose residual stream is float32.

    Of gradients, `chance` may be added: a rounding lets some elements pass a ReLU on one side only.
    """
    assert off(found[0], wanted[0].double()) < 3 * off(plain[0], wanted[0].double()) + 1e-3
    for one, other, true in zip(found[1:], plain[1:], wanted[1:], strict=True):
        assert off(one, true.double()) < 2 * off(other, true.double()) + chance


def assert_as_good_as_plain(plain: Any, x: Tensor, precision: str, side_streams: int = 1) -> None:
    dtype = None if DTYPES[precision] == torch.float32 else DTYPES[precision]
    exact = reference(plain)
    dy = torch.randn_like(exact(x.double()))
    wanted = results(exact, x.double(), dy, None)
    theirs = results(plain, x, dy, dtype)
    net = fused_stage(plain)
    net.side_streams = side_streams
    chance = GRADIENT_TOLERANCE[torch.float16 if precision == "tf32" else DTYPES[precision]]
    assert_as_good(results(net, x, dy, dtype), theirs, wanted, chance)


STAGES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "layer1": ((64, 64, 3), (2, 64, 56, 56)),
    "layer2": ((256, 128, 2, 2), (2, 256, 51, 37)),
    "layer4": ((1024, 512, 2, 2), (2, 1024, 25, 25)),
    "grouped": ((256, 128, 2, 2, 32), (2, 256, 28, 28)),
    "one pixel": ((64, 64, 1, 2), (3, 64, 1, 1)),
    "odd channels": ((24, 24, 2), (2, 24, 9, 9)),
}


@every_dtype
@pytest.mark.parametrize("name", STAGES)
def test_stages_are_as_good_as_the_plain_ones(name: str, precision: str) -> None:
    arguments, shape = STAGES[name]
    torch.manual_seed(1)
    assert_as_good_as_plain(stage(*arguments), feature_map(shape), precision)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("most", [0, 256], ids=["cudnn", "product"])
def test_either_way_back_through_a_stage(most: int, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fasttrain.callbacks.bottleneck import in_triton

    monkeypatch.setattr(in_triton, "PRODUCT_DEPTH", most)
    monkeypatch.setattr(in_triton, "PRODUCT_COLUMNS", most)
    assert_as_good_as_plain(stage(64, 64, 3), feature_map((2, 64, 28, 28)), precision)


def test_a_backward_under_another_autocast() -> None:
    net, x, dy = fused_stage(stage(64, 64, 2)), feature_map((1, 64, 8, 8)), feature_map((1, 256, 8, 8))
    wanted = results(net, x, dy, torch.float16)
    net.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.float16):
        y = net(x)
    with torch.autocast("cuda", torch.bfloat16):
        y.backward(dy.half())
    for parameter, other in zip(net.parameters(), wanted[2:], strict=True):
        assert parameter.grad is not None
        assert off(parameter.grad, other.double()) < 1e-3


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_other_layouts(layout: str) -> None:
    x = torch.randn(2, 64, 9, 18, device="cuda")
    assert_as_good_as_plain(stage(64, 64, 2), x[..., ::2] if layout == "strided" else x, "fp16")


def test_an_empty_batch() -> None:
    net, x = fused_stage(stage(64, 64, 2, 2)), feature_map((0, 64, 8, 8), torch.float32).requires_grad_()
    with torch.autocast("cuda", torch.float16):
        y = net(x)
    y.float().sum().backward()
    assert y.shape == (0, 256, 4, 4)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in net.parameters())


@pytest.mark.parametrize("side_streams", [0, 1, 3])
def test_side_streams_change_nothing(side_streams: int) -> None:
    assert_as_good_as_plain(stage(256, 128, 3, 2), feature_map((4, 256, 64, 64)), "fp16", side_streams)


def test_side_streams_give_the_same_again_and_again() -> None:
    """Memory that another stream still reads would sooner or later be written to."""
    net, x = fused_stage(stage(256, 128, 4, 2)), feature_map((8, 256, 64, 64), torch.float16)
    net.half()
    net.side_streams = 3
    dy = feature_map((8, 512, 32, 32), torch.float16)
    first = [each.clone() for each in results(net, x, dy, None)]
    for _ in range(20):
        for one, other in zip(results(net, x, dy, None), first, strict=True):
            # cuDNN's weight gradients may add up in another order.
            assert off(one, other.double()) < 1e-3


@pytest.mark.parametrize("side_streams", [0, 1, 3])
def test_in_a_captured_graph(side_streams: int) -> None:
    net, x = fused_stage(stage(256, 128, 3, 2)), feature_map((4, 256, 32, 32))
    net.side_streams = side_streams
    dy = feature_map((4, 512, 16, 16))
    kept: list[list[Tensor]] = []
    replay = captured(lambda: kept.append(results(net, x, dy, torch.float16)))
    x.copy_(torch.randn_like(x))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.1)
    replay()
    found = [each.clone() for each in kept[-1]]
    for one, other in zip(found, results(net, x, dy, torch.float16), strict=True):
        assert off(one, other.double()) < 2e-3


def test_a_graph_reads_statistics_that_were_loaded_later_and_folded_eagerly() -> None:
    net, x = fused_stage(stage(64, 64, 2)), feature_map((1, 64, 8, 8), torch.float16)
    net.half()
    kept: list[Tensor] = []
    with torch.no_grad():
        replay = captured(lambda: kept.append(net(x)))
        net.load_state_dict({key: value * 1.5 for key, value in net.state_dict().items()})
        wanted = net(x).clone()
        replay()
    torch.testing.assert_close(kept[-1], wanted)


def test_nothing_waits_for_the_gpu() -> None:
    net, x = fused_stage(stage(64, 64, 2)), feature_map((2, 64, 16, 16))
    dy = feature_map((2, 256, 16, 16))
    results(net, x, dy, torch.float16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(net, x, dy, torch.float16)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_stage_used_twice() -> None:
    plain, x, dy = stage(256, 64, 2), feature_map((2, 256, 16, 16)), feature_map((2, 256, 16, 16))
    wanted = results(nn.Sequential(plain, plain), x, dy, None)
    both = fused_stage(plain)
    for one, other in zip(results(nn.Sequential(both, both), x, dy, None), wanted, strict=True):
        assert off(one, other.double()) < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_compiled(dtype: torch.dtype) -> None:
    net, x, dy = fused_stage(stage(64, 64, 2)), feature_map((2, 64, 16, 16)), feature_map((2, 256, 16, 16))
    wanted = results(net, x, dy, dtype)
    torch._dynamo.reset()
    compiled: Any = torch.compile(net, fullgraph=True)
    for one, other in zip(results(compiled, x, dy, dtype), wanted, strict=True):
        assert off(one, other.double()) < 0.2


@pytest.mark.parametrize("name", ["resnet50", "resnext50_32x4d"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_backbones_with_frozen_bn_for_what_is_left(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = randomized(getattr(resnet, name)(weights=None, norm_layer=FrozenBatchNorm2d))
    x = feature_map((4, 3, 96, 96))
    dy = torch.randn(4, 1000, device="cuda")
    wanted, plain = results(model, x, dy, None), results(model, x, dy, dtype)
    surgery = BottleneckSurgery(model)
    assert len(surgery.apply()) == 4
    FrozenBNSurgery(model).apply()
    assert isinstance(model.layer1, FusedStage)
    assert_as_good(results(model, x, dy, dtype), plain, wanted, GRADIENT_TOLERANCE[dtype])
