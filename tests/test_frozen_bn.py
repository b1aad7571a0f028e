"""frozen_bn against its reference in float64, in both tiers; what autograd may ask of it; and what is folded."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from frozen_norms import DEVICE, assert_close, eval_norm, frozen_norm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

from fasttrain.callbacks.frozen_bn import (
    Folded,
    ScaleBias,
    fold,
    in_triton,
    scale_bias_add_relu,
    scale_bias_dual_relu,
    scale_bias_relu,
    twin,
)
from fasttrain.callbacks.frozen_bn.reference import TOLERANCE, normalized, reference
from fasttrain.errors import OptimizationError

LAST = torch.channels_last
FORMS = ("relu", "add", "dual")
both_tiers = pytest.mark.parametrize("tier", ["torch", "triton"])
every_form = pytest.mark.parametrize("form", FORMS)


def feature_map(shape: Sequence[int], dtype: torch.dtype = torch.float32, layout: str = "last") -> Tensor:
    n, c, h, w = shape
    if layout == "strided":
        return torch.randn(n, c, h, 2 * w, device=DEVICE).to(dtype)[..., ::2]
    x = torch.randn(n, c, h, w, device=DEVICE).to(dtype)
    return x.contiguous(memory_format=LAST) if layout == "last" else x


def constants(channels: int) -> ScaleBias:
    return ScaleBias(torch.randn(channels, device=DEVICE), torch.randn(channels, device=DEVICE))


def double(folded: ScaleBias) -> ScaleBias:
    return ScaleBias(folded.scale.double(), folded.bias.double())


def ours(form: str, x: Tensor, z: Tensor, one: ScaleBias, two: ScaleBias, tier: Any = "auto") -> Tensor:
    if form == "relu":
        return scale_bias_relu(x, one, tier)
    if form == "add":
        return scale_bias_add_relu(x, one, z, tier)
    return scale_bias_dual_relu(x, one, z, two, tier)


def in_double(form: str, x: Tensor, z: Tensor, one: ScaleBias, two: ScaleBias) -> Tensor:
    return reference(x, double(one), z if form != "relu" else None, double(two) if form == "dual" else None)


def assert_equals_reference(form: str, x: Tensor, z: Tensor, tier: Any) -> None:
    """Values and both gradients, away from where rounding decides whether an element passes."""
    one, two = constants(x.shape[1]), constants(x.shape[1])
    x, z = (t.detach().requires_grad_() for t in (x, z))
    xd, zd = (t.detach().double().requires_grad_() for t in (x, z))
    inputs = 1 if form == "relu" else 2
    found, wanted = ours(form, x, z, one, two, tier), in_double(form, xd, zd, one, two)
    assert found.dtype == x.dtype
    assert_close(found.detach(), wanted.detach(), TOLERANCE[x.dtype])
    with torch.no_grad():
        shifted = normalized(xd, double(one))
        if form != "relu":
            shifted = shifted + (normalized(zd, double(two)) if form == "dual" else zd)
        certain = shifted.abs() > 1e-4
    dy = feature_map(x.shape, x.dtype) * certain
    gradients = torch.autograd.grad(found, [x, z][:inputs], dy)
    for gradient, exact in zip(gradients, torch.autograd.grad(wanted, [xd, zd][:inputs], dy.double()), strict=True):
        assert gradient.dtype == x.dtype
        assert_close(gradient, exact, TOLERANCE[x.dtype])


@both_tiers
@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    batch=st.integers(0, 3), channels=st.one_of(st.integers(1, 20), st.sampled_from([24, 64, 320])),
    height=st.integers(1, 7), width=st.integers(1, 7),
    layouts=st.tuples(*[st.sampled_from(["last", "first", "strided"])] * 2),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_values_and_gradients_equal_the_reference(
    tier: str, form: str, dtype: torch.dtype, batch: int, channels: int, height: int, width: int,
    layouts: tuple[str, str], seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    shape = (batch, channels, height, width)
    assert_equals_reference(form, feature_map(shape, dtype, layouts[0]), feature_map(shape, dtype, layouts[1]), tier)


@every_form
def test_float64_is_differentiated_rightly_and_twice(form: str) -> None:
    torch.manual_seed(0)
    x, z = (torch.randn(2, 3, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    one, two = (ScaleBias(*torch.randn(2, 3, dtype=torch.float64)) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x, z: ours(form, x, z, one, two), (x, z))
    assert torch.autograd.gradgradcheck(lambda x, z: ours(form, x, z, one, two), (x, z))


@pytest.mark.parametrize("channels", [3, 48])
@pytest.mark.parametrize("layout", ["last", "first"])
def test_programs_of_several_tiles_share_their_channels(channels: int, layout: str) -> None:
    tiling = in_triton.Tiling(vectors=4, tiles=3)
    x, z = feature_map((2, channels, 5, 3), layout=layout), feature_map((2, channels, 5, 3), layout=layout)
    one, two = constants(channels), constants(channels)
    y, mask = in_triton.forward(x, one, z, two, True, tiling)
    wanted = in_double("dual", x.double(), z.double(), one, two)
    assert_close(y, wanted, TOLERANCE[torch.float32])
    assert mask.numel() == -(-x.numel() // 8)
    dx, dz = in_triton.backward(x, None, mask, one.scale, two.scale, torch.float32, torch.float32, tiling)
    assert dx is not None
    assert dz is not None
    passed = x.double() * (wanted > 0)
    assert_close(dx, passed * double(one).scale.view(-1, 1, 1), TOLERANCE[torch.float32])
    assert_close(dz, passed * double(two).scale.view(-1, 1, 1), TOLERANCE[torch.float32])


@both_tiers
def test_memory_formats_stay(tier: Any) -> None:
    for layout, memory_format in (("last", LAST), ("first", torch.contiguous_format), ("strided", LAST)):
        x = feature_map((2, 4, 3, 5), layout=layout).requires_grad_()
        y = scale_bias_relu(x, constants(4), tier)
        if layout != "strided" or tier == "triton":
            assert y.is_contiguous(memory_format=memory_format)
        y.sum().backward()  # an expanded gradient
        assert x.grad is not None


@both_tiers
def test_nan_and_infinity_are_seen(tier: Any) -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0], device=DEVICE).view(1, 1, 2, 2).requires_grad_()
    y = scale_bias_relu(x, ScaleBias(*torch.tensor([[2.0], [0.0]], device=DEVICE)), tier)
    assert torch.equal(y.isnan().flatten(), torch.tensor([True, False, False, False], device=DEVICE))
    assert y.flatten()[1:].tolist() == [torch.inf, 0.0, 2.0]
    y.backward(torch.full_like(y, torch.inf))
    assert x.grad is not None
    assert x.grad.flatten()[2] == 0, "an infinite gradient of what the ReLU stopped is 0, not NaN"


def test_the_mask_alone_is_kept() -> None:
    x = feature_map((2, 16, 4, 4)).requires_grad_()
    y = scale_bias_relu(x, constants(16), "triton")
    node: Any = y.grad_fn
    sizes = [t.numel() * t.element_size() for t in node.saved_tensors if t is not None]
    assert sorted(sizes) == [16 * 4, x.numel() // 8]
    with torch.no_grad():
        assert scale_bias_relu(x, constants(16), "triton").grad_fn is None


def test_only_wanted_gradients_are_computed() -> None:
    one = constants(4)
    for wants in ((True, False), (False, True)):
        x, z = (feature_map((1, 4, 3, 3)).requires_grad_(want) for want in wants)
        scale_bias_add_relu(x, one, z, "triton").sum().backward()
        assert [t.grad is not None for t in (x, z)] == list(wants)


def test_mixed_dtypes_add_up_as_in_pytorch() -> None:
    x, z = feature_map((1, 4, 3, 3), torch.float16).requires_grad_(), feature_map((1, 4, 3, 3)).requires_grad_()
    one = constants(4)
    for tier in ("torch", "triton"):
        y = scale_bias_add_relu(x, one, z, tier)  # type: ignore[arg-type]
        assert y.dtype == torch.float32
        dx, dz = torch.autograd.grad(y.sum(), (x, z))
        assert (dx.dtype, dz.dtype) == (torch.float16, torch.float32)


@every_form
def test_a_second_derivative_of_the_kernels_is_refused(form: str) -> None:
    x, z = feature_map((1, 4, 2, 2)).requires_grad_(), feature_map((1, 4, 2, 2)).requires_grad_()
    y = ours(form, x, z, constants(4), constants(4), "triton")
    with pytest.raises(
        OptimizationError, match=r"frozen_bn: a gradient that can be differentiated again .*reference\."
    ):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_a_second_backward_gives_the_same() -> None:
    x = feature_map((1, 4, 2, 2)).requires_grad_()
    y = scale_bias_relu(x, constants(4), "triton")
    (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(first, second)


@pytest.mark.parametrize("uses", ["both", "y", "twin", "y twice"])
def test_the_gradients_of_an_output_and_its_twin_add_up(uses: str) -> None:
    torch.manual_seed(0)
    x, z, one = feature_map((1, 4, 3, 3)).requires_grad_(), feature_map((1, 4, 3, 3)).requires_grad_(), constants(4)

    def loss(y: Tensor, other: Tensor) -> Tensor:
        parts = {"y": [y.square()], "twin": [other.sin()], "y twice": [y.square(), y.sin()]}
        return sum(parts.get(uses, [y.square(), other.sin()])).sum()  # type: ignore[return-value, union-attr]

    y = scale_bias_add_relu(x, one, z, "triton", twice=True)
    other = twin(y)
    assert other is not y
    assert other.data_ptr() == y.data_ptr()
    found = torch.autograd.grad(loss(y, other), (x, z))
    plain = reference(x, one, z)
    for one_gradient, wanted in zip(found, torch.autograd.grad(loss(plain, plain), (x, z)), strict=True):
        torch.testing.assert_close(one_gradient, wanted)


def test_a_twin_is_not_used_after_its_tensor_was_written_to() -> None:
    x = feature_map((1, 4, 3, 3)).requires_grad_()
    y = scale_bias_add_relu(x, constants(4), feature_map((1, 4, 3, 3)), "triton", twice=True)
    y.mul_(2)
    assert twin(y) is y
    plain = torch.zeros(2)
    assert twin(plain) is plain


def test_under_autocast() -> None:
    conv, norm = nn.Conv2d(3, 4, 3, device=DEVICE), frozen_norm(4).to(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        x = conv(torch.randn(2, 3, 6, 6, device=DEVICE))
        y = scale_bias_relu(x, fold(norm))
    assert y.dtype == torch.bfloat16
    assert_close(y.detach(), reference(x.detach().double(), double(fold(norm))), TOLERANCE[torch.bfloat16])
    y.float().sum().backward()
    assert conv.weight.grad is not None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(2, 3)}, "of shape (N, C, H, W); this one is torch.float32 of (2, 3)."),
        ({"x": torch.zeros(1, 3, 2, 2).long()}, "this one is torch.int64"),
        ({"z": torch.zeros(1, 3, 2, 1)}, "(1, 3, 2, 2) on cpu; this is (1, 3, 2, 1) on cpu."),
        ({"one": ScaleBias(torch.zeros(3), torch.zeros(4))}, "each of the 3 channels, on cpu; these have shape (4,)"),
        ({"one": ScaleBias(torch.zeros(3), torch.zeros(3, requires_grad=True))}, "get no gradient, and one of these"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    arguments = {"x": torch.zeros(1, 3, 2, 2), "z": torch.zeros(1, 3, 2, 2), "one": ScaleBias(*torch.zeros(2, 3))}
    arguments |= change
    with pytest.raises(OptimizationError) as caught:
        scale_bias_add_relu(arguments["x"], arguments["one"], arguments["z"])  # type: ignore[arg-type]
    assert str(caught.value).startswith("frozen_bn: ")
    assert words in str(caught.value)


@pytest.mark.parametrize("make", [frozen_norm, eval_norm])
def test_folded_once_and_again_after_a_change(make: Any) -> None:
    norm, x = make(5), torch.randn(2, 5, 3, 3)
    folded = Folded(norm, "frozen_bn")
    torch.testing.assert_close(normalized(x, folded()), norm(x))
    first = folded()
    assert folded() is first, "kept"
    before = first.scale.clone()
    norm.load_state_dict({key: value + 1 for key, value in norm.state_dict().items()})
    assert folded() is first, "in the same memory, which a captured graph reads"
    assert not torch.equal(folded().scale, before)
    torch.testing.assert_close(normalized(x, folded()), norm(x))
    norm.double()
    assert folded().scale.dtype == torch.float64


def test_folded_in_inference_mode_it_serves_training() -> None:
    folded = Folded(frozen_norm(4), "frozen_bn")
    with torch.inference_mode():
        folded()
    x = feature_map((1, 4, 2, 2)).requires_grad_()
    scale_bias_relu(x, folded().__class__(*(t.to(DEVICE) for t in folded())), "triton").sum().backward()


def test_the_fold_is_in_float32_with_eps() -> None:
    norm = FrozenBatchNorm2d(2, eps=0.5).half()
    assert fold(norm).scale.dtype == torch.float32
    torch.testing.assert_close(fold(norm).scale, torch.full((2,), 1.5**-0.5))
    plain = nn.BatchNorm2d(2, affine=False).eval()
    torch.testing.assert_close(fold(plain).bias, torch.zeros(2))
