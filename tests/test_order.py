"""The order of samples: seeded, split over ranks, resumable in the middle of an epoch."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from fasttrain.order import EpochOrder, ResumableLoader, SampleKey


class Keys(Dataset[Any]):
    """Hands out the keys themselves."""

    def __getitem__(self, key: SampleKey) -> torch.Tensor:
        return torch.tensor([key.epoch, key.index])

    def __len__(self) -> int:
        raise AssertionError("the order knows the size")


def indices(order: EpochOrder) -> list[int]:
    return [key.index for key in order]


@settings(max_examples=60, deadline=None)
@given(size=st.integers(0, 40), world_size=st.integers(1, 5), epoch=st.integers(0, 9), shuffle=st.booleans())
def test_every_sample_once_an_epoch_over_all_ranks(size: int, world_size: int, epoch: int, shuffle: bool) -> None:
    shares = []
    for rank in range(world_size):
        order = EpochOrder(size, shuffle=shuffle, seed=3, rank=rank, world_size=world_size)
        order.set_epoch(epoch)
        keys = list(order)
        assert len(keys) == len(order)
        assert all(key.epoch == epoch for key in keys)
        shares.append([key.index for key in keys])
    assert sorted(index for share in shares for index in share) == list(range(size)), "none lost, none padded"
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@settings(max_examples=60, deadline=None)
@given(size=st.integers(0, 40), world_size=st.integers(1, 5))
def test_even_leaves_out_fewer_than_there_are_ranks(size: int, world_size: int) -> None:
    shares = [
        indices(EpochOrder(size, shuffle=True, seed=0, rank=rank, world_size=world_size, even=True))
        for rank in range(world_size)
    ]
    assert {len(share) for share in shares} == {size // world_size}
    seen = [index for share in shares for index in share]
    assert len(set(seen)) == len(seen) > size - world_size


def test_the_order_is_set_by_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        one = EpochOrder(50, shuffle=True, seed=seed)
        one.set_epoch(epoch)
        return indices(one)

    torch.manual_seed(1)
    first = order(0, 0)
    torch.manual_seed(2)
    assert order(0, 0) == first, "whatever the global random state is"
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    assert indices(EpochOrder(5, shuffle=False, seed=9)) == [0, 1, 2, 3, 4]


def test_what_is_left_out_changes_with_the_epoch() -> None:
    left_out = set()
    for epoch in range(60):
        seen = []
        for rank in range(2):
            order = EpochOrder(5, shuffle=True, seed=0, rank=rank, world_size=2, even=True)
            order.set_epoch(epoch)
            seen += indices(order)
        left_out |= set(range(5)) - set(seen)
    assert left_out == set(range(5))


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_is_none(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=rf"^rank {rank} is outside 0\.\.{world_size - 1}$"):
        EpochOrder(5, shuffle=False, seed=0, rank=rank, world_size=world_size)


def loader(**options: Any) -> ResumableLoader:
    return ResumableLoader(Keys(), EpochOrder(10, shuffle=True, seed=1), **{"batch_size": 3, **options})


def batches(of: ResumableLoader, epoch: int) -> list[list[list[int]]]:
    of.order.set_epoch(epoch)
    return [batch.tolist() for batch in of]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("served", range(5))
def test_a_loader_goes_on_where_it_stood(served: int, drop_last: bool) -> None:
    whole = batches(loader(drop_last=drop_last), epoch=2)
    served = min(served, len(whole))
    stopped = loader(drop_last=drop_last)
    stopped.order.set_epoch(2)
    iterator = iter(stopped)
    for _ in range(served):
        next(iterator)
    state = stopped.state_dict()
    assert state == {"epoch": 2, "batches": served} or served == 0
    fresh = loader(drop_last=drop_last)
    fresh.load_state_dict(state)
    assert batches(fresh, epoch=2) == whole[served:]
    assert fresh.state_dict() == {"epoch": 2, "batches": len(whole)}, "the position counts those before the resume"
    assert batches(fresh, epoch=3) == batches(loader(drop_last=drop_last), epoch=3), "the next epoch is a whole one"
    assert len(fresh) == len(whole), "Lightning counts an epoch by its whole length"


def test_a_state_of_another_epoch_is_no_position_in_this_one() -> None:
    fresh = loader()
    fresh.load_state_dict({"epoch": 1, "batches": 4})
    assert batches(fresh, epoch=2) == batches(loader(), epoch=2)


def test_the_position_is_that_of_the_batches_handed_out_not_prepared() -> None:
    with_workers = loader(num_workers=1, prefetch_factor=4)
    iterator = iter(with_workers)
    first = next(iterator).tolist()
    assert with_workers.state_dict()["batches"] == 1
    assert first == batches(loader(), epoch=0)[0]


def test_iterating_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    list(loader())
    assert torch.equal(torch.get_rng_state(), before)
