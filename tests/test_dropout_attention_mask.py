"""The dropout mask made of products of random words looks like one of independent draws."""

import pytest
import torch
from torch import Tensor

from fasttrain.callbacks.dropout_attention.mask import draw_words, keep_mask, threshold

TOKENS, HEADS = 512, 24


@pytest.fixture(scope="module", params=[0.1, 0.5])
def standardized(request: pytest.FixtureRequest) -> Tensor:
    """Masks of mean 0 and variance 1, if they are what they should be, (heads, queries, keys)."""
    p = request.param
    torch.manual_seed(0)
    keep = keep_mask(draw_words(HEADS, TOKENS, "cpu"), p)
    return (keep.double() - (1 - p)) / (p * (1 - p)) ** 0.5


def test_as_many_are_kept_as_should_be(standardized: Tensor) -> None:
    assert abs(float(standardized.mean())) < 5 / (HEADS * TOKENS**2) ** 0.5


@pytest.mark.parametrize("dim", [1, 2], ids=["keys'", "queries'"])
def test_counts_spread_like_independent_ones(standardized: Tensor, dim: int) -> None:
    """A row's sum has a variance of TOKENS; the mean of so many squares is off by sqrt(2 / count)."""
    sums = standardized.sum(dim) / TOKENS**0.5
    assert abs(float(sums.square().mean()) - 1) < 5 * (2 / sums.numel()) ** 0.5


def test_rows_columns_and_quadruples_are_not_correlated(standardized: Tensor) -> None:
    for masks in (standardized, standardized.transpose(1, 2)):
        products = masks @ masks.transpose(1, 2) / TOKENS**0.5
        other = products.masked_fill(torch.eye(TOKENS, dtype=torch.bool), 0)
        mean = float(other.square().sum() / (HEADS * TOKENS * (TOKENS - 1)))
        assert mean == pytest.approx(1, abs=0.02), "squares of correlations, as of independent rows"
        assert float(other.abs().max()) < 8
    half = TOKENS // 2
    upper, lower = standardized[:, :half], standardized[:, half:]
    corners = upper[..., :half] * upper[..., half:] * lower[..., :half] * lower[..., half:]
    assert abs(float(corners.mean())) < 5 / corners.numel() ** 0.5


def test_no_direction_stands_out(standardized: Tensor) -> None:
    """The largest singular value of independent entries is near 2 sqrt(n); structure would show as a larger one."""
    largest = torch.linalg.matrix_norm(standardized[:4], ord=2)
    independent = torch.linalg.matrix_norm(torch.randn(4, TOKENS, TOKENS, dtype=torch.float64), ord=2)
    torch.testing.assert_close(largest.mean(), independent.mean(), rtol=0.02, atol=0)


def test_heads_and_calls_differ() -> None:
    words = draw_words(2, 64, "cpu")
    first, second = keep_mask(words, 0.5)
    assert 0.4 < float((first == second).float().mean()) < 0.6
    assert not torch.equal(keep_mask(draw_words(2, 64, "cpu"), 0.5), keep_mask(words, 0.5))


def test_the_threshold_is_a_share_of_all_words() -> None:
    assert threshold(0.0) == -(2**31)
    assert threshold(0.5) == 0
    assert threshold(0.25) == -(2**30)
