"""On real streams: batches arrive bit for bit, none is overwritten under a slow step, and captured steps agree."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_fits import Small, assert_same_state, batches, fit, same_start
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fasttrain.callbacks import CUDAGraphStep, DeviceBatches, DevicePrefetcher
from fasttrain.callbacks.device_prefetch.reference import moved_plainly

pytestmark = pytest.mark.gpu


def slow(milliseconds: float) -> None:
    torch.cuda._sleep(int(milliseconds * 1.7e6))


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("options", [{}, {"channels_last": True}, {"dtype": torch.bfloat16}], ids=str)
def test_batches_arrive_as_the_references(options: dict[str, Any], pinned: bool) -> None:
    device = torch.device("cuda")
    made: list[Any] = [
        {"x": torch.rand(4, 3, 64, 64), "u": torch.randint(256, (4, 3, 9, 9), dtype=torch.uint8)} for _ in range(9)
    ]
    host = [{name: tensor.pin_memory() for name, tensor in batch.items()} for batch in made] if pinned else made
    for batch, arrived in zip(made, DeviceBatches(host, device, **options), strict=True):
        expected = moved_plainly(batch, device, **options)
        for name, tensor in expected.items():
            assert torch.equal(arrived[name], tensor)
            assert arrived[name].stride() == tensor.stride()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("delays", [lambda: 0.0, lambda: 3.0, lambda: random.choice([0.0, 0.0, 8.0])])
def test_nothing_is_overwritten_under_a_slow_step(delays: Callable[[], float], channels_last: bool) -> None:
    host = [torch.full((8, 3, 256, 256), float(i)).pin_memory() for i in range(16)]
    numbers = [random.randrange(16) for _ in range(150)]
    loader: Any = [host[number] for number in numbers]
    sums: list[Tensor] = []
    for batch in DeviceBatches(loader, "cuda", channels_last=channels_last):
        slow(delays())  # on the step's stream, before it reads
        sums.append(batch.double().mean())
        batch.add_(1000)  # a step may write to its batch
    assert torch.stack(sums).tolist() == [float(number) for number in numbers]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("graph", [False, True])
def test_a_fit_is_what_it_was(graph: bool, workers: int) -> None:
    made = batches(40)
    data = TensorDataset(torch.cat([b[0] for b in made]), torch.cat([b[1] for b in made]))

    def loader() -> DataLoader[Any]:
        return DataLoader(data, batch_size=6, num_workers=workers, pin_memory=True)

    ours, plain = same_start(Small)
    prefetch = DevicePrefetcher()
    steps = [CUDAGraphStep() if graph else None for _ in range(2)]
    mine = fit(ours, loader(), steps[0], callbacks=[prefetch], accelerator="gpu", max_epochs=3)
    theirs = fit(plain, loader(), steps[1], accelerator="gpu", max_epochs=3)
    assert_same_state(mine, theirs)
    assert prefetch.exchange is not None
    assert prefetch.exchange.exchanged == 120
