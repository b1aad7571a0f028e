"""The masks of layer_norm_dropout: their rate, their independence, and when they are the same again."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layer_norm_calls import DEVICE, Work, both_tiers
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fasttrain.callbacks.layer_norm_dropout import draw_seed, dropout_add_layer_norm, keep_mask
from fasttrain.callbacks.layer_norm_dropout.mask import _philox, threshold


def test_philox_gives_the_known_answers() -> None:
    """Of its authors' Random123: zeros for counter and key, by number of rounds."""
    answers = {
        7: [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48],
        10: [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
    }
    for rounds, words in answers.items():
        assert [int(word) for word in _philox(torch.zeros(1, dtype=torch.int64), 1, 1, rounds)] == words


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_rate_is_p_and_elements_are_independent(p: float) -> None:
    torch.manual_seed(0)
    shape = (512, 1000)
    seed = draw_seed("cpu")
    # One seed and the next one, another call, and a neighbour in each direction.
    masks = [keep_mask(s, shape, p) for s in (seed, seed + 1, draw_seed("cpu"))]
    masks += [masks[0].roll(1, 0), masks[0].roll(1, 1), masks[0].roll(2, 1), masks[0].roll(8, 1)]
    count = masks[0].numel()
    for mask in masks[:3]:
        assert abs(float((~mask).sum()) - p * count) < 5 * (p * (1 - p) * count) ** 0.5
    both = p**4 + 2 * (p * (1 - p)) ** 2 + (1 - p) ** 4  # the share that agrees has this one's variance at most
    assert both < 1
    for other in masks[1:]:
        agreeing = float((masks[0] == other).sum()) / count
        assert abs(agreeing - (p**2 + (1 - p) ** 2)) < 5 * (0.25 / count) ** 0.5
    by_row, by_column = ((~masks[0]).double().mean(dim) for dim in (1, 0))
    for rates, size in ((by_row, shape[1]), (by_column, shape[0])):
        assert float(rates.std()) == pytest.approx((p * (1 - p) / size) ** 0.5, rel=0.15)


def test_thresholds() -> None:
    assert [threshold(p) for p in (0.0, 0.5, 1.0)] == [0, 32768, 65536]
    assert keep_mask(torch.tensor([5]), (3, 5), 0.0).all()
    assert not keep_mask(torch.tensor([5]), (3, 5), 1.0).any()
    assert keep_mask(torch.tensor([5]), (2, 3, 5), 0.5).shape == (2, 3, 5)


def test_the_gradient_is_scaled_where_kept_and_zero_where_not() -> None:
    work, seed = Work((5, 32)), draw_seed(DEVICE)
    gradients = work.gradients(work.ours(p=0.2, seed=seed, tier="triton"), torch.randn(5, 32, device=DEVICE))
    keep = keep_mask(seed, (5, 32), 0.2)
    torch.testing.assert_close(gradients["x"], gradients["residual"] * keep / 0.8)
    assert 0 < int(keep.sum()) < keep.numel()


@both_tiers
def test_everything_dropped_leaves_the_residual(tier: Any) -> None:
    work = Work((3, 8), without=frozenset({"weight", "bias"}))
    y, residual = work.ours(p=1.0, tier=tier), work.inputs["residual"]
    assert residual is not None
    torch.testing.assert_close(y, F.layer_norm(residual, (8,)), rtol=1e-5, atol=1e-5)
    assert not work.gradients(y, torch.randn_like(y))["x"].any()


@both_tiers
def test_another_mask_at_each_call_and_the_same_after_manual_seed(tier: Any) -> None:
    work = Work((4, 16))
    torch.manual_seed(3)
    first, second = work.ours(p=0.5, tier=tier), work.ours(p=0.5, tier=tier)
    torch.manual_seed(3)
    assert torch.equal(work.ours(p=0.5, tier=tier), first)
    assert not torch.equal(first, second)


@both_tiers
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_draws_the_same_mask(tier: Any, reentrant: bool) -> None:
    torch.manual_seed(0)
    work, dy = Work((4, 16)), torch.randn(4, 16, device=DEVICE)

    def call(x: Tensor) -> Tensor:
        return dropout_add_layer_norm(x, work.inputs["weight"], None, x, p=0.5, tier=tier, twice=True) * 2

    found = []
    for run in (call, lambda x: checkpoint(call, x, use_reentrant=reentrant)):
        torch.manual_seed(3)
        y: Any = run(work.inputs["x"])  # type: ignore[arg-type]
        assert work.inputs["weight"] is not None
        work.inputs["weight"].grad = None
        y.backward(dy)
        found.append((y.detach(), work.inputs["weight"].grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_seed_gives_both_tiers_the_same_mask() -> None:
    work, seed = Work((4, 24)), draw_seed(DEVICE)
    torch.testing.assert_close(work.ours(p=0.5, seed=seed, tier="triton"), work.ours(p=0.5, seed=seed, tier="torch"))
