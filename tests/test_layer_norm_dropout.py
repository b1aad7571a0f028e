"""layer_norm_dropout against its reference in float64, in both tiers; what autograd may ask of it; what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layer_norm_calls import DEVICE, Work, assert_close, both_tiers
from torch import Tensor

from fasttrain.callbacks.layer_norm_dropout import draw_seed, dropout_add_layer_norm, in_triton, twin
from fasttrain.callbacks.layer_norm_dropout.reference import TOLERANCE, reference
from fasttrain.errors import OptimizationError


@both_tiers
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@settings(max_examples=7, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.integers(0, 7), hidden=st.one_of(st.integers(16, 40), st.sampled_from([64, 200])),
    without=st.frozensets(st.sampled_from(["weight", "bias", "residual", "x_bias"])),
    p=st.sampled_from([0.0, 0.1, 0.5]), narrow=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_values_and_gradients_equal_the_reference(
    tier: str, dtype: torch.dtype, rows: int, hidden: int, without: frozenset[str], p: float, narrow: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    parameters = torch.float16 if narrow and dtype == torch.float16 else torch.float32
    Work((rows, hidden), dtype, parameters, without).assert_equals_reference(p, tier)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("keep_normalized", [True, False])
def test_each_way_of_tiling_and_of_keeping(monkeypatch: pytest.MonkeyPatch, rows: int, keep_normalized: bool) -> None:
    torch.manual_seed(0)
    tile = in_triton.Tile(rows=rows)
    tiling = in_triton.Tiling(forward=tile, backward=tile, keep_normalized=keep_normalized)
    for function in (in_triton.forward, in_triton.backward, in_triton.keeps_normalized):
        monkeypatch.setattr(function, "__defaults__", (tiling,))
    Work((9, 24)).assert_equals_reference(0.25, "triton")


@both_tiers
def test_leading_dimensions_and_strides(tier: Any) -> None:
    torch.manual_seed(0)
    work = Work((2, 3, 12))
    assert work.inputs["x"] is not None
    assert work.inputs["residual"] is not None
    work.inputs["x"] = work.inputs["x"].detach().transpose(0, 1).requires_grad_()
    work.inputs["residual"] = (
        work.inputs["residual"].detach().repeat(1, 1, 2)[..., ::2].transpose(0, 1).requires_grad_()
    )
    assert not work.inputs["x"].is_contiguous()
    work.assert_equals_reference(0.5, tier)


@both_tiers
@pytest.mark.parametrize("wanted", ["x", "residual", "weight", "bias", "x_bias"])
def test_a_single_gradient(tier: Any, wanted: str) -> None:
    torch.manual_seed(0)
    work = Work((3, 10))
    seed, dy = draw_seed(DEVICE), torch.randn(3, 10, device=DEVICE)
    all_of_them = work.gradients(work.ours(p=0.3, seed=seed, tier=tier), dy)
    for name, tensor in work.inputs.items():
        assert tensor is not None
        tensor.requires_grad_(name == wanted)
    (alone,) = work.gradients(work.ours(p=0.3, seed=seed, tier=tier), dy).values()
    torch.testing.assert_close(alone, all_of_them[wanted])


def test_without_dropout_one_gradient_serves_both() -> None:
    work = Work((3, 10), without=frozenset({"x_bias"}))
    gradients = work.gradients(work.ours(tier="triton"), torch.randn(3, 10, device=DEVICE))
    assert gradients["x"].data_ptr() == gradients["residual"].data_ptr()
    x = torch.randn(3, 10, device=DEVICE, requires_grad=True)
    dropout_add_layer_norm(x, residual=x, tier="triton").square().sum().backward()
    leaf = x.detach().double().requires_grad_()
    reference(leaf, None, None, leaf).square().sum().backward()
    assert x.grad is not None
    assert leaf.grad is not None
    assert_close(x.grad, leaf.grad, 1e-4)


@both_tiers
def test_mixed_dtypes_and_autocast(tier: Any) -> None:
    torch.manual_seed(0)
    work = Work((3, 16), torch.float16)
    work.inputs["residual"] = torch.randn(3, 16, device=DEVICE, requires_grad=True)
    assert work.ours(tier=tier).dtype == torch.float32
    with torch.autocast(DEVICE, torch.float16):
        y = work.ours(tier=tier)
    assert y.dtype == torch.float16, "F.layer_norm gives float32"
    assert_close(y.detach(), work.in_double(None, 0)[0].detach(), TOLERANCE[torch.float16])
    gradients = work.gradients(y, torch.randn_like(y))
    assert {name: g.dtype for name, g in gradients.items()} == {
        n: t.dtype for n, t in work.inputs.items() if t is not None
    }
    with torch.autocast(DEVICE, torch.float16):
        assert Work((2, 4), torch.float64, torch.float64).ours().dtype == torch.float64


def test_float64_is_differentiated_rightly_and_twice() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, 5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    inputs += [torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def call(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, x_bias: Tensor) -> Tensor:
        seed = torch.tensor([3])
        return dropout_add_layer_norm(x, weight, bias, residual, p=0.25, x_bias=x_bias, seed=seed)

    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


def test_a_second_derivative_is_refused() -> None:
    work = Work((2, 4))
    (y, x) = work.ours(tier="triton"), work.inputs["x"]
    with pytest.raises(OptimizationError, match=r"differentiated again .* tier='torch'\.$"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_a_shared_weight_used_twice() -> None:
    torch.manual_seed(0)
    work = Work((3, 8))
    weight, bias, dy = work.inputs["weight"], work.inputs["bias"], torch.randn(3, 8, device=DEVICE)

    def twice(tier: Any) -> tuple[Tensor, ...]:
        y = dropout_add_layer_norm(work.ours(tier=tier), weight, bias, tier=tier)
        return torch.autograd.grad(y, [weight, bias, work.inputs["x"]], dy)  # type: ignore[list-item]

    for found, wanted in zip(twice("triton"), twice("torch"), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@both_tiers
def test_rows_of_one_element_are_the_bias(tier: Any) -> None:
    work = Work((3, 1))
    y = work.ours(tier=tier)
    assert torch.equal(y, work.inputs["bias"].expand(3, 1))  # type: ignore[union-attr]
    assert not work.gradients(y, torch.ones_like(y))["x"].any()


def test_large_values_do_not_spoil_the_variance() -> None:
    x = torch.randn(4, 64, device=DEVICE) + 1000
    y = dropout_add_layer_norm(x, tier="triton")
    assert_close(y, reference(x.double(), None, None), 1e-4)


@both_tiers
def test_a_twin_has_a_gradient_of_its_own(tier: Any) -> None:
    torch.manual_seed(0)
    work, seed = Work((3, 8)), draw_seed(DEVICE)
    one, other = torch.randn(2, 3, 8, device=DEVICE)
    y = work.ours(p=0.5, seed=seed, tier=tier, twice=True)
    assert torch.equal(twin(y), y)
    assert (twin(y) is y) == (tier == "torch")
    x = work.inputs["x"]
    assert x is not None
    torch.autograd.backward([y, twin(y).view_as(y)], [one, other])
    torch.testing.assert_close(x.grad, work.gradients(work.ours(p=0.5, seed=seed, tier=tier), one + other)["x"])
    y = work.ours(tier=tier, twice=True)
    y.mul_(2)
    assert twin(y) is y, "its history is another one now"
    alone = work.ours(p=0.5, seed=seed, tier=tier, twice=True)
    torch.autograd.grad(twin(alone), x, one)


def test_what_is_refused() -> None:
    x, h = torch.randn(2, 4), torch.randn(4)
    refused: list[tuple[Callable[[], Tensor], str]] = [
        (lambda: dropout_add_layer_norm(x.int()), r"floating point .* this is torch\.int32 of \(2, 4\)\."),
        (lambda: dropout_add_layer_norm(x[:, :0]), r"this is torch\.float32 of \(2, 0\)\."),
        (lambda: dropout_add_layer_norm(x, p=1.5), r"from 0 to 1; it is 1\.5\."),
        (lambda: dropout_add_layer_norm(x, residual=h), r"\(2, 4\) on cpu; this is \(4,\) on cpu\."),
        (lambda: dropout_add_layer_norm(x, h[:3]), r"weight has one value for each of the 4 .* shape \(3,\) on cpu\."),
        (lambda: dropout_add_layer_norm(x, bias=x), r"bias has one value"),
        (lambda: dropout_add_layer_norm(x, x_bias=x), r"x_bias has one value"),
        (lambda: dropout_add_layer_norm(torch.randn(1, 8193), tier="triton"), r"rows of 8193 .* up to 8192 in float16"),
        (lambda: dropout_add_layer_norm(x.double(), tier="triton"), r"4 elements with float64 on cpu"),
    ]
    for call, message in refused:
        with pytest.raises(OptimizationError, match=f"^layer_norm_dropout: .*{message}"):
            call()
    assert dropout_add_layer_norm(torch.randn(1, 8193)).shape == (1, 8193), "auto takes PyTorch's operators"
