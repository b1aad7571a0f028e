"""The parts of bottleneck's stages: products of 1x1 convolutions, gates and scales, and what cuDNN refuses."""

from functools import partial
from typing import Any

import pytest
import torch
from bottleneck_stages import DEVICE, LAST, assert_close, both_tiers, feature_map
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fasttrain.callbacks.bottleneck import convolution as convolution_module
from fasttrain.callbacks.bottleneck import (
    in_torch,
    in_triton,
)
from fasttrain.callbacks.bottleneck.operators import Geometry


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
