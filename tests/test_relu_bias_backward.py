"""relu_bias_backward against PyTorch's own derivatives, in both tiers, for any size of matrix."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fasttrain.callbacks.relu_bias_backward import as_rows, column_sums, relu_bias_backward
from fasttrain.errors import OptimizationError

pytest.importorskip("triton")
from fasttrain.callbacks.relu_bias_backward import in_triton
from fasttrain.callbacks.relu_bias_backward.in_triton import (
    MASKED,
    SUMS,
    WIDE_SUMS,
    Tiling,
    programs_for,
    rows_together,
    tiling_for,
)
from fasttrain.callbacks.relu_bias_backward.kernel import INTERPRETED

DEVICE = "cpu" if INTERPRETED.value else "cuda"
both_tiers = pytest.mark.parametrize("tier", ["torch", "triton"])


def matrices(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    g, y = (torch.randn(rows, columns, device=DEVICE).to(dtype) for _ in range(2))
    return g, y.relu()


def expected(g: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
    masked = g if y is None else torch.ops.aten.threshold_backward(g, y, 0)
    return masked, masked.double().sum(0)


def assert_sums(found: Tensor, wanted: Tensor, rows: int) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6 * max(1, rows))


@both_tiers
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.integers(0, 70),
    columns=st.one_of(st.integers(1, 40), st.sampled_from([64, 256, 264, 300])),
    seed=st.integers(0, 99),
)
def test_equals_pytorch(tier: Any, dtype: torch.dtype, rows: int, columns: int, seed: int) -> None:
    torch.manual_seed(seed)
    g, y = matrices(rows, columns, dtype)
    masked, sums = relu_bias_backward(g, y, tier)
    wanted, wanted_sums = expected(g, y)
    assert masked.dtype == dtype
    assert torch.equal(masked, wanted)
    assert_sums(sums, wanted_sums, rows)
    assert_sums(column_sums(g, tier), expected(g, None)[1], rows)


TILINGS = [
    Tiling(64, 16, 1, 3, 1, 1, fold_rows=16, fold_columns=4, fold_warps=1), Tiling(256, 256, 4, 8),
    Tiling(32, 64, 1, 1, 1, 1, fold_rows=16, fold_columns=32, fold_warps=1),
]  # fmt: skip


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize(("rows", "columns"), [(96, 12), (100, 36), (33, 70), (1, 5)])
def test_any_tiling_covers_the_matrix(tiling: Tiling, rows: int, columns: int) -> None:
    torch.manual_seed(0)
    g, y = matrices(rows, columns)
    masked, sums = in_triton.relu_bias_backward(g, y, tiling)
    wanted, wanted_sums = expected(g, y)
    assert masked is not None
    assert torch.equal(masked, wanted)
    assert_sums(sums, wanted_sums, rows)


@pytest.mark.parametrize(
    ("rows", "columns", "together"), [(160000, 36, 64), (10000, 2376, 16), (7, 3, 1), (64, 256, 1)]
)
def test_narrow_rows_are_seen_together(rows: int, columns: int, together: int) -> None:
    assert rows_together(rows, columns, 256) == together


@pytest.mark.parametrize(
    ("rows", "columns", "relu", "tiling", "programs"),
    [
        (160000, 256, True, MASKED, 792),  # all that the GPU holds at once
        (160000, 2376, True, MASKED, 2),
        (40000, 256, True, MASKED, 500),
        (10000, 256, True, MASKED, 264),  # a small matrix, which is not worth more lines of sums
        (160, 256, True, MASKED, 10),  # one for each tile
        (160000, 256, False, SUMS, 1056),
        (160000, 36, False, SUMS, 31),
        (6912, 1024, False, SUMS, 86),
        (160000, 2376, False, WIDE_SUMS, 3),
        (100, 2**20, False, WIDE_SUMS, 1),
    ],
)
def test_how_many_programs_share_a_column(rows: int, columns: int, relu: bool, tiling: Tiling, programs: int) -> None:
    assert tiling_for(rows, columns, relu) is tiling
    together = rows_together(rows, columns, tiling.columns)
    tiles = -(-rows // together // (tiling.elements // tiling.columns))
    assert programs_for(tiles, columns * together // tiling.columns, tiling) == programs


@both_tiers
def test_not_a_number_goes_back_and_stopped_infinity_does_not(tier: Any) -> None:
    y = torch.tensor([[torch.nan, 0.0, 1.0]], device=DEVICE)
    masked, _ = relu_bias_backward(torch.full_like(y, torch.inf), y, tier)
    assert masked.tolist() == [[torch.inf, 0.0, torch.inf]]
    masked, sums = relu_bias_backward(torch.full_like(y, torch.nan), y, tier)
    assert masked.isnan().tolist() == [[True, False, True]]
    assert sums.isnan().tolist() == [True, False, True]


@both_tiers
def test_strided_and_mixed_inputs(tier: Any) -> None:
    torch.manual_seed(0)
    g, y = torch.randn(6, 10, device=DEVICE)[:, ::2], torch.randn(5, 6, device=DEVICE).half().t()
    before = g.clone()
    masked, sums = relu_bias_backward(g, y, tier)
    wanted, wanted_sums = expected(g, y.float())
    assert torch.equal(masked, wanted)
    assert_sums(sums, wanted_sums, 6)
    assert torch.equal(g, before), "others may have been handed the same gradient"
    expanded = torch.ones(1, 1, device=DEVICE).expand(4, 3)
    assert column_sums(expanded, tier).tolist() == [4.0] * 3


def test_float64_is_summed_in_float64() -> None:
    g, y = (torch.randn(5, 3, dtype=torch.float64) for _ in range(2))
    assert relu_bias_backward(g, y)[1].dtype == torch.float64
    with pytest.raises(OptimizationError, match=r"takes float16, bfloat16 and float32, and this is torch\.float64"):
        column_sums(g, "triton")


def test_a_channels_last_map_is_a_matrix_without_a_copy() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    rows = as_rows(x)
    assert rows.shape == (40, 3)
    assert rows.data_ptr() == x.data_ptr()
    assert torch.equal(as_rows(x.contiguous()), rows)


@pytest.mark.parametrize(
    ("g", "y", "tier", "words"),
    [
        (torch.zeros(3), torch.zeros(3), "auto", "of shape (M, C); this one is torch.float32 of (3,)."),
        (torch.zeros(2, 3).int(), torch.zeros(2, 3), "auto", "this one is torch.int32"),
        (torch.zeros(2, 3), torch.zeros(3, 2), "auto", "(2, 3) on cpu; this is torch.float32 of (3, 2) on cpu."),
        (torch.zeros(2, 3), torch.zeros(2, 3), "tritn", "there is no tier 'tritn'; "),
    ],
)
def test_what_does_not_fit_is_refused(g: Tensor, y: Tensor, tier: Any, words: str) -> None:
    with pytest.raises(OptimizationError) as caught:
        relu_bias_backward(g, y, tier)
    assert str(caught.value).startswith("relu_bias_backward: ")
    assert words in str(caught.value)


def test_under_torch_compile_it_is_pytorchs_operators() -> None:
    g, y = matrices(4, 3)
    compiled = torch.compile(relu_bias_backward, backend="aot_eager", fullgraph=True)
    masked, sums = compiled(g, y)
    assert torch.equal(masked, expected(g, y)[0])
    assert_sums(sums, expected(g, y)[1], 4)
