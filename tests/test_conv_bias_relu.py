"""conv_bias_relu against its reference in float64, who computes, and what autograd and autocast may ask of it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fasttrain.callbacks.conv_bias_relu import conv_bias, conv_bias_relu, tiers
from fasttrain.callbacks.conv_bias_relu.geometry import Geometry
from fasttrain.callbacks.conv_bias_relu.reference import TOLERANCE, reference
from fasttrain.callbacks.conv_bias_relu.tiers import tier_for
from fasttrain.errors import OptimizationError

pytest.importorskip("triton")
from fasttrain.callbacks.conv_bias_relu import in_cudnn, in_triton
from fasttrain.callbacks.conv_bias_relu.in_triton import Tiling
from fasttrain.callbacks.conv_bias_relu.kernel import INTERPRETED

DEVICE = "cpu" if INTERPRETED.value else "cuda"
LAST = torch.channels_last
both_tiers = pytest.mark.parametrize("tier", ["torch", "triton"])
with_and_without_relu = pytest.mark.parametrize("relu", [True, False], ids=["relu", "no relu"])


def work(
    shape: tuple[int, int, int, int], outputs: int, geometry: Geometry, kernel: tuple[int, int] = (3, 3),
    dtype: torch.dtype = torch.float32, layout: str = "last",
) -> list[Tensor]:  # fmt: skip
    """Return x, weight and bias, which want gradients."""
    n, c, h, w = shape
    x = torch.randn(n, c, h, 2 * w if layout == "strided" else w)
    x = x[..., ::2] if layout == "strided" else x
    tensors = [x, torch.randn(outputs, c // geometry.groups, *kernel) / (c * 9) ** 0.5, torch.randn(outputs)]
    tensors = [t.to(DEVICE, dtype) for t in tensors]
    if layout == "last":
        tensors[0] = tensors[0].contiguous(memory_format=LAST)
    return [t.detach().requires_grad_() for t in tensors]


def fused(x: Tensor, weight: Tensor, bias: Tensor, geometry: Geometry, relu: bool, tier: Any = "triton") -> Tensor:
    return (conv_bias_relu if relu else conv_bias)(x, weight, bias, *geometry, tier=tier)


def off(found: Tensor, wanted: Tensor, scale: Tensor | None = None) -> float:
    scale = (wanted if scale is None else scale).detach().norm().clamp(min=1e-3)
    return float((found.detach().double() - wanted.detach()).norm() / scale)


def assert_equals_reference(tensors: list[Tensor], geometry: Geometry, relu: bool, tier: Any) -> None:
    exact = [t.detach().double().requires_grad_() for t in tensors]
    found = fused(*tensors, geometry, relu, tier)  # type: ignore[arg-type]
    sums = reference(*exact, geometry, False)  # type: ignore[arg-type]
    wanted = sums.relu() if relu else sums
    assert found.shape == wanted.shape
    assert found.dtype == tensors[0].dtype
    tolerance = TOLERANCE[found.dtype]
    # What is rounded are the sums, most of which a ReLU may take away.
    assert off(found, wanted, sums) <= tolerance
    # Rounding may let an element pass the ReLU on one side only, if it is next to zero. Gradients are those of ours.
    passed = found.detach() > 0 if relu else torch.ones_like(found, dtype=torch.bool)
    if relu and (other := passed != (sums > 0)).any():
        assert sums[other].abs().max() <= 4 * tolerance * sums.abs().max()
    g = torch.randn_like(found)
    gradients = torch.autograd.grad(found, tensors, g)
    rights = torch.autograd.grad(sums, exact, (g * passed).double())
    for tensor, gradient, right in zip(tensors, gradients, rights, strict=True):
        assert gradient.dtype == tensor.dtype
        assert off(gradient, right) <= tolerance


@both_tiers
@with_and_without_relu
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    dtype=st.sampled_from([torch.float32, torch.float16]), batch=st.integers(0, 3), channels=st.integers(1, 6),
    outputs=st.one_of(st.integers(1, 9), st.just(36)), size=st.tuples(st.integers(3, 7), st.integers(3, 7)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)), pairs=st.tuples(*[st.integers(1, 2)] * 4),
    padding=st.integers(0, 2), groups=st.sampled_from([1, 1, 2]),
    layout=st.sampled_from(["last", "first", "strided"]), seed=st.integers(0, 99),
)  # fmt: skip
def test_equals_the_reference(
    tier: str, relu: bool, dtype: torch.dtype, batch: int, channels: int, outputs: int, size: tuple[int, int],
    kernel: tuple[int, int], pairs: tuple[int, ...], padding: int, groups: int, layout: str, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    geometry = Geometry(pairs[:2], (padding, 1), pairs[2:], groups)  # type: ignore[arg-type]
    if any(size[i] + 2 * geometry.padding[i] < geometry.dilation[i] * (kernel[i] - 1) + 1 for i in (0, 1)):
        return
    tensors = work((batch, channels * groups, *size), outputs * groups, geometry, kernel, dtype, layout)
    assert geometry.output_elements(*tensors[:2]) == reference(*tensors, geometry, relu).numel()  # type: ignore[arg-type]
    if batch == 0:
        tier = "auto"
    assert_equals_reference(tensors, geometry, relu, tier)


PLAIN = Geometry((1, 1), (1, 1), (1, 1), 1)


@with_and_without_relu
def test_float64_is_differentiated_rightly_and_twice(relu: bool) -> None:
    torch.manual_seed(0)
    tensors = work((1, 2, 4, 4), 3, PLAIN, dtype=torch.float64)
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda *t: fused(*t, PLAIN, relu, "auto"), tensors)  # type: ignore[operator]


@pytest.mark.parametrize("tiling", [Tiling(32, 16, 1), Tiling(64, 64, 2)])
@with_and_without_relu
def test_the_bias_pass_covers_any_matrix(tiling: Tiling, relu: bool) -> None:
    for rows, channels in ((1, 1), (48, 12), (7, 20), (5, 65)):
        y, bias = torch.randn(rows, channels, device=DEVICE), torch.randn(channels, device=DEVICE)
        wanted = (y + bias).relu() if relu else y + bias
        in_triton.add_bias(y, bias, relu, tiling)
        assert torch.equal(y, wanted)


def test_not_a_number_is_seen() -> None:
    y = torch.tensor([[torch.nan, -1.0, 1.0]], device=DEVICE)
    in_triton.add_bias(y, torch.zeros(3, device=DEVICE), True)
    assert y.isnan().tolist() == [[True, False, False]]


@with_and_without_relu
@pytest.mark.parametrize(
    "wants", [(True, False, False), (False, True, False), (False, False, True), (True, False, True)]
)
def test_only_wanted_gradients_are_computed(relu: bool, wants: tuple[bool, ...]) -> None:
    torch.manual_seed(0)
    tensors = [t.requires_grad_(want) for t, want in zip(work((2, 3, 4, 4), 5, PLAIN), wants, strict=True)]
    wanted = [t for t in tensors if t.requires_grad]
    found = torch.autograd.grad(fused(*tensors, PLAIN, relu).sum(), wanted)  # type: ignore[arg-type]
    right = torch.autograd.grad(reference(*tensors, PLAIN, relu).sum(), wanted)  # type: ignore[arg-type]
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other)


def test_what_is_kept_for_the_backward() -> None:
    tensors = work((2, 3, 4, 4), 5, PLAIN)
    node: Any = fused(*tensors, PLAIN, False).grad_fn  # type: ignore[arg-type]
    assert [t is not None for t in node.saved_tensors] == [True, True, False]
    y = fused(*tensors, PLAIN, True)  # type: ignore[arg-type]
    node = y.grad_fn
    assert node.saved_tensors[2].data_ptr() == y.data_ptr(), "the output itself, which the next layer keeps"
    with torch.no_grad():
        assert fused(*tensors, PLAIN, True).grad_fn is None  # type: ignore[arg-type]


def test_a_second_backward_gives_the_same_and_a_second_derivative_is_refused() -> None:
    x, weight, bias = work((1, 3, 4, 4), 2, PLAIN)
    y = fused(x, weight, bias, PLAIN, True)
    first = torch.autograd.grad(y.sum(), (x, weight, bias), retain_graph=True)
    second = torch.autograd.grad(y.sum(), (x, weight, bias), retain_graph=True)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    with pytest.raises(OptimizationError, match=r"conv_bias_relu: a gradient that can be .* or pass tier='torch'\."):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_a_weight_used_twice_gets_both_gradients() -> None:
    torch.manual_seed(0)
    x, weight, bias = work((2, 4, 5, 5), 4, PLAIN)
    found = fused(fused(x, weight, bias, PLAIN, True), weight, bias, PLAIN, True)
    wanted = reference(reference(x, weight, bias, PLAIN, True), weight, bias, PLAIN, True)
    pairs = (torch.autograd.grad(y.square().sum(), (x, weight, bias)) for y in (found, wanted))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_under_autocast_it_computes_in_autocasts_dtype_and_gives_gradients_in_the_parameters() -> None:
    torch.manual_seed(0)
    x, weight, bias = work((2, 3, 4, 4), 5, PLAIN)
    with torch.autocast(DEVICE, torch.float16):
        y = fused(x, weight, bias, PLAIN, True)
        z = reference(x, weight, bias, PLAIN, True)
    assert y.dtype == torch.float16
    assert off(y, z.double()) < TOLERANCE[torch.float16]
    for one, other in zip(*(torch.autograd.grad(t.sum(), (x, weight, bias)) for t in (y, z)), strict=True):
        assert one.dtype == torch.float32
        assert off(one, other.double()) < 2 * TOLERANCE[torch.float16]


def test_who_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, _ = work((2, 3, 4, 4), 5, PLAIN)
    assert tier_for("auto", x, weight, x.dtype, PLAIN, True) == "torch", "on a CPU"
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.version, "hip", None)

    def auto(relu: bool = True, x: Tensor = x, weight: Tensor = weight, groups: int = 1) -> str:
        return tier_for("auto", x, weight, x.dtype, PLAIN._replace(groups=groups), relu)

    monkeypatch.setattr(tiers, "_has_cudnn_graph", lambda: False)
    assert auto() == "cudnn"
    assert auto(relu=False) == "triton"
    assert auto(x=x.double(), weight=weight.double()) == "torch"
    assert auto(x=x.contiguous()) == "torch"
    assert auto(x=x.contiguous(), weight=weight.contiguous(memory_format=LAST)) == "cudnn"
    assert auto(x=x[:0]) == "torch"
    assert auto(weight=torch.randn(3, 1, 3, 3), groups=3) == "triton", "depthwise"
    assert auto(weight=weight.half()) == "torch", "which says what is wrong"
    half = {"x": x.half(), "weight": weight.half()}
    assert auto(relu=False, **half) == "triton"
    monkeypatch.setattr(tiers, "_has_cudnn_graph", lambda: True)
    assert auto(relu=False, **half) == "cudnn_graph"
    assert auto(**half) == "cudnn"
    assert auto(relu=False) == "triton", "float32"
    assert auto(relu=False, x=half["x"], weight=torch.randn(6, 1, 3, 3).half(), groups=3) == "triton"
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    assert auto() == "triton"
    assert auto(relu=False, **half) == "triton"


def test_a_package_that_is_asked_for_and_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, _ = work((2, 3, 4, 4), 5, PLAIN)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(tiers, "_has_cudnn_graph", lambda: False)
    with pytest.raises(
        OptimizationError, match=r"'cudnn_graph' can't take this: the package nvidia-cudnn-frontend is "
    ):
        tier_for("cudnn_graph", x, weight, x.dtype, PLAIN, False)
    monkeypatch.setattr(tiers, "_has_cudnn_graph", lambda: True)
    assert tier_for("cudnn_graph", x, weight, x.dtype, PLAIN, False) == "cudnn_graph"


def test_what_cudnn_refuses_is_done_in_two_passes_and_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, weight, bias = (t.detach() for t in work((2, 3, 4, 4), 5, PLAIN))
    calls = []

    def refuse(*arguments: Any) -> Tensor:
        calls.append(arguments)
        raise RuntimeError("Unable to find an engine to execute this computation")

    monkeypatch.setattr(torch, "cudnn_convolution_relu", refuse)
    monkeypatch.setattr(in_cudnn, "_refused", set())
    for _ in range(2):
        y = in_cudnn.forward(x, weight, bias, bias, PLAIN, True)
        torch.testing.assert_close(y, reference(x, weight, bias, PLAIN, True))
    assert len(calls) == 1
    in_cudnn.forward(x[:1], weight, bias, bias, PLAIN, True)
    assert len(calls) == 2, "another shape"

    def no_memory(*arguments: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "cudnn_convolution_relu", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        in_cudnn.forward(x, weight[:4], bias[:4], bias[:4], PLAIN, True)


def test_cudnns_operator_is_called_as_it_is_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = torch.ops.aten.cudnn_convolution_relu.default._schema
    names = ["self", "weight", "bias", "stride", "padding", "dilation", "groups"]
    assert [argument.name for argument in schema.arguments] == names
    monkeypatch.setattr(
        torch, "cudnn_convolution_relu", lambda x, w, b, s, p, d, g: F.conv2d(x, w, b, s, p, d, g).relu()
    )
    torch.manual_seed(0)
    geometry = Geometry((2, 1), (0, 1), (1, 2), 2)
    x, weight, bias = work((2, 4, 6, 6), 6, geometry)
    y = in_cudnn.forward(x, weight, bias, bias, geometry, True)
    torch.testing.assert_close(y, reference(x, weight, bias, geometry, True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bias": torch.zeros(4)}, "channel, 5 by the weight of shape (5, 3, 3, 3); this one has shape (4,)."),
        ({"padding": "same"}, "padding is an integer or two of them, vertical and horizontal; this is 'same'."),
        ({"stride": (1, 1, 1)}, "stride is an integer or two of them"),
        ({"tier": "cudn"}, "there is no tier 'cudn'; "),
        ({"tier": "cudnn"}, "tier='cudnn' can't take this: an NVIDIA GPU is needed, and x is on cpu; tier='auto' can."),
        (
            {"tier": "triton", "x": torch.zeros(3, 4, 4)},
            "x must be (N, C, H, W) with something in it, and is (3, 4, 4)",
        ),
        ({"tier": "triton", "x": torch.zeros(1, 3, 4, 4).double()}, "and this is torch.float64; tier='auto' can."),
        ({"tier": "triton", "x": torch.zeros(1, 3, 4, 4).half()}, "the weight is torch.float32 on cpu, for x of"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = dict(zip(("x", "weight", "bias"), work((1, 3, 4, 4), 5, PLAIN), strict=True))
    with pytest.raises(OptimizationError) as caught:
        conv_bias_relu(**(arguments | change))
    assert str(caught.value).startswith("conv_bias_relu: ")
    assert words in str(caught.value)


def test_an_unbatched_image_goes_through_as_in_conv2d() -> None:
    x, weight, bias = work((1, 3, 4, 4), 5, PLAIN)
    assert torch.equal(conv_bias_relu(x[0], weight, bias, padding=1), F.conv2d(x[0], weight, bias, padding=1).relu())


def test_shapes_alone_go_through_as_in_conv2d() -> None:
    x, weight, bias = (t.to("meta") for t in work((1, 3, 4, 4), 5, PLAIN))
    assert conv_bias_relu(x, weight, bias, padding=1).shape == (1, 5, 4, 4)
