"""Windows drawn on the host: torchvision's distribution, a pure function of seed, epoch and index."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from fasttrain.crop_windows import DRAWS, centre_starts, random_windows, resized_sizes
from fasttrain.order import SampleKey
from fasttrain.recipes.retinanet.dataset import flips
from fasttrain.sample_random import fair_coins, sample_bits, sample_states, uniforms

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
# For two samples of n numbers, their distribution functions differ by more than this once in ten thousand times:
# Kolmogorov and Smirnov's asymptotic bound, sqrt(-log(alpha / 2) / n).
CRITICAL = np.sqrt(-np.log(1e-4 / 2))


def visits(count: int) -> list[SampleKey]:
    return [SampleKey(0, index) for index in range(count)]


def drawn(size: tuple[int, int], count: int, scale: tuple[float, float] = SCALE) -> np.ndarray:
    """Return top, left, height and width of windows in an image of one width and height, (count, 4)."""
    state = sample_states(7, visits(count))
    sizes = np.full((count, 2), size, dtype=np.int32)
    return np.concatenate(random_windows(sizes, uniforms(state, DRAWS), scale, RATIO), axis=1)


def torchvisions(size: tuple[int, int], count: int, scale: tuple[float, float] = SCALE) -> np.ndarray:
    torch.manual_seed(0)
    crop = v2.RandomResizedCrop(224, scale=scale, ratio=RATIO)
    image = torch.empty(3, *size[::-1], device="meta")
    found = [crop.make_params([image]) for _ in range(count)]
    return np.array([[one["top"], one["left"], one["height"], one["width"]] for one in found])


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Return Kolmogorov and Smirnov's statistic of two samples."""
    at = np.concatenate([one, other])
    functions = [np.searchsorted(np.sort(sample), at, side="right") / len(sample) for sample in (one, other)]
    return float(np.abs(functions[0] - functions[1]).max())


@pytest.mark.parametrize(
    ("size", "scale"), [((500, 375), SCALE), ((375, 500), SCALE), ((640, 120), SCALE), ((500, 375), (0.6, 0.9))]
)
def test_areas_ratios_and_places_are_distributed_as_torchvisions(
    size: tuple[int, int], scale: tuple[float, float]
) -> None:
    count = 3000
    ours, theirs = drawn(size, count, scale), torchvisions(size, count, scale)
    for of in (
        lambda window: window[:, 2] * window[:, 3],
        lambda window: window[:, 3] / window[:, 2],
        lambda window: window[:, 0],
        lambda window: window[:, 1],
        lambda window: window[:, 0] + window[:, 2],
        lambda window: window[:, 1] + window[:, 3],
    ):
        assert distance(of(ours), of(theirs)) * np.sqrt(count) < CRITICAL


@pytest.mark.parametrize("size", [(5, 4), (3, 9)])
def test_each_window_of_a_small_image_is_as_frequent_as_torchvisions(size: tuple[int, int]) -> None:
    """Rounding, places at the very edge and the number of attempts show where there are few windows: chi-squared."""
    count = 6000
    together = np.concatenate([drawn(size, count), torchvisions(size, count)])
    windows, which = np.unique(together, axis=0, return_inverse=True)
    ours, theirs = (np.bincount(half, minlength=len(windows)) for half in np.split(which.ravel(), 2))
    statistic = ((ours - theirs) ** 2 / (ours + theirs)).sum()
    freedom = len(windows) - 1
    assert freedom > 15
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


def test_the_comparison_tells_another_distribution() -> None:
    ours, theirs = drawn((500, 375), 3000, (0.12, 1.0)), torchvisions((500, 375), 3000)
    assert distance(ours[:, 2] * ours[:, 3], theirs[:, 2] * theirs[:, 3]) * np.sqrt(3000) > CRITICAL


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(1, 400))
def test_every_window_lies_in_its_image(width: int, height: int) -> None:
    top, left, down, across = drawn((width, height), 50).T
    assert top.min() >= 0
    assert left.min() >= 0
    assert min(down.min(), across.min()) >= 1
    assert (top + down).max() <= height
    assert (left + across).max() <= width


@settings(max_examples=60, deadline=None)
@given(st.integers(5, 400), st.integers(5, 400))
def test_where_no_window_fits_it_is_torchvisions_in_the_middle(short: int, more: int) -> None:
    """An area of the whole image with an allowed ratio fits into no image that is longer than 4 : 3."""
    for size in ((short, 2 * short + more), (2 * short + more, short)):
        expected = torchvisions(size, 1, (0.97, 1.0))
        assert (drawn(size, 3, (0.97, 1.0)) == expected).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 900), st.integers(2, 900), st.integers(1, 300))
def test_validation_sizes_and_centres_are_torchvisions(width: int, height: int, shorter: int) -> None:
    sizes = np.array([[width, height]], dtype=np.int32)
    resized = functional.resize(torch.empty(1, height, width, device="meta"), [shorter])
    assert resized_sizes(sizes, shorter).tolist() == [list(resized.shape[1:])]
    side = min(shorter, 3)
    image = torch.arange(resized.shape[1] * resized.shape[2]).view(1, *resized.shape[1:])
    top, left = centre_starts(resized_sizes(sizes, shorter), side)[0].tolist()
    cut = image[:, top : top + side, left : left + side]
    assert torch.equal(functional.center_crop(image, [side]), cut)


def test_numbers_belong_to_seed_epoch_and_index_alone() -> None:
    keys = [SampleKey(epoch, index) for epoch in range(3) for index in range(5)]
    state = sample_states(11, keys)
    for row, key in enumerate(keys):
        alone = sample_states(11, [key])
        assert alone.tolist() == [sample_bits(11, *key)]
        assert uniforms(alone, 4).tolist() == uniforms(state, 4)[row : row + 1].tolist()
        assert bool(fair_coins(alone)[0]) == flips(11, key.epoch, key.index), "RetinaNet's coin"
    other = sample_states(12, keys)
    assert len({*state.tolist(), *other.tolist()}) == 30
    assert sample_states(-1, keys).tolist() == sample_states(2**64 - 1, keys).tolist()


def test_numbers_are_uniform_and_independent_of_each_other_and_of_the_coin() -> None:
    count = 20000
    state = sample_states(3, visits(count))
    numbers = uniforms(state, DRAWS)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    even = (np.arange(count) + 0.5) / count
    for column in numbers.T:
        assert distance(column, even) * np.sqrt(count) < CRITICAL
    correlations = np.corrcoef(np.concatenate([numbers, fair_coins(state)[:, None]], axis=1).T)
    assert np.abs(correlations - np.eye(DRAWS + 1)).max() < 4.5 / np.sqrt(count)
    following = np.corrcoef(numbers[1:, 0], numbers[:-1, 0])[0, 1]
    assert abs(following) < 4.5 / np.sqrt(count)


def test_no_keys_give_no_windows() -> None:
    state = sample_states(0, [])
    start, shape = random_windows(np.zeros((0, 2), np.int32), uniforms(state, DRAWS), SCALE, RATIO)
    assert start.shape == shape.shape == (0, 2)
    assert start.dtype == shape.dtype == np.int32
