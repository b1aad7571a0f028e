"""device_prefetch in Lightning's fits: the same batches in the same steps, whatever hooks and callbacks do."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from everything import Data
from everything import Module as Everything
from graph_fits import Batches, Kept, Small, assert_same_state, batches, fit, same_start
from prefetched_fits import no_thread_is_left, prefetcher
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fasttrain.callbacks import CUDAGraphStep, DevicePrefetcher, DevicePrefetchOptimization
from fasttrain.callbacks.channels_last import batch_to_channels_last
from fasttrain.callbacks.device_prefetch.optimization import DevicePrefetchConfig
from fasttrain.environment import Hardware
from fasttrain.errors import ConfigError
from fasttrain.optimization import Applies, Context, ExampleBatch, Refuses
from fasttrain.trainer import transform_batches

_no_thread_is_left = pytest.fixture(autouse=True)(no_thread_is_left)


class Without:
    """A stream of batches."""

    def __init__(self, made: Batches) -> None:
        self.made = made

    def __iter__(self) -> Iterator[Any]:
        return iter(self.made)


CASES: dict[str, dict[str, Any]] = {
    "epochs": {"max_epochs": 3},
    "limit": {"limit_train_batches": 4},
    "max_steps": {"max_steps": 13, "max_epochs": -1},
    "validation": {"val_check_interval": 3},
    "accumulate": {"accumulate_grad_batches": 3},
    "reload": {"reload_dataloaders_every_n_epochs": 1},
    "half": {"precision": "bf16-true"},
}


@pytest.mark.parametrize(
    ("stream", "ahead"), [(False, "always"), (False, "auto"), (True, "always")], ids=["thread", "in turn", "stream"]
)
@pytest.mark.parametrize("name", CASES)
def test_a_fit_is_what_it_was(name: str, stream: bool, ahead: str) -> None:
    options = CASES[name]
    ours, plain = same_start(Small)
    loader: Callable[[], Any] = (lambda: Without(batches(10, (6, 4)))) if stream else (lambda: batches(10, (6, 4)))
    prefetch, kept, expected = prefetcher(ahead=ahead), Kept(), Kept()
    mine = fit(ours, loader(), callbacks=[prefetch, kept], validation=batches(2), **options)
    theirs = fit(plain, loader(), callbacks=[expected], validation=batches(2), **options)
    assert (kept.losses, kept.metrics, kept.steps) == (expected.losses, expected.metrics, expected.steps)
    assert_same_state(mine, theirs)
    assert prefetch.exchange is not None
    # Of a stream Lightning fetches the first batch before training starts; a limit is a length to it.
    assert prefetch.exchange.unmoved == (1 if stream and name != "limit" else 0)
    assert prefetch.exchange.exchanged + prefetch.exchange.unmoved == len(kept.losses)
    (change,) = prefetch.changes
    assert ("by a thread" in change.what) == (ahead == "always")


def test_validation_batches_are_left_alone() -> None:
    made = batches(6)
    prefetch = prefetcher()
    fit(Small(), made, callbacks=[prefetch], validation=made, val_check_interval=2, num_sanity_val_steps=2)
    assert prefetch.exchange is not None
    assert (prefetch.exchange.exchanged, prefetch.exchange.unmoved) == (12, 0), "the same tensors, though"


@pytest.mark.parametrize("transform", [False, True])
def test_with_captured_steps(transform: bool) -> None:
    """Whose inputs are filled from the batch on the device, and not from the host's past it."""

    class Layout(pl.Callback):
        def setup(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
            if transform:
                transform_batches(trainer, batch_to_channels_last)

    ours, plain = same_start(Small)
    graph, prefetch = CUDAGraphStep(stand_in=True), prefetcher()
    mine = fit(ours, batches(10), graph, callbacks=[prefetch, Layout()])
    theirs = fit(plain, batches(10))
    assert_same_state(mine, theirs)
    assert prefetch.exchange is not None
    assert prefetch.exchange.exchanged == 20
    assert sum(tally.hits for tally in graph.pool.tallies.values()) >= 10


def test_the_module_prepares_ahead() -> None:
    calls: list[tuple[str, bool]] = []

    class Prepares(Small):
        def prepare_batch(self, batch: Any) -> Any:
            calls.append((threading.current_thread().name, torch.is_grad_enabled()))
            return (batch[0], batch[1], batch[0].sum(1))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if len(batch) == 2:
                batch = self.prepare_batch(batch)
            assert torch.equal(batch[2], batch[0].sum(1))
            return super().training_step(batch[:2], batch_idx)

    ours, plain = same_start(Prepares)
    mine = fit(ours, batches(5), callbacks=[prefetcher()])
    assert len(calls) == 10, "once for each batch"
    assert calls.count(("device_prefetch", False)) == 8, "all but the first of an epoch in the thread"
    assert_same_state(mine, fit(plain, batches(5)))


def test_a_callback_may_keep_its_batches() -> None:
    class Keeps(pl.Callback):
        def __init__(self) -> None:
            self.batches: list[Any] = []

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.batches.append(batch)

    keeps, made = Keeps(), batches(9)
    fit(Small(), made, callbacks=[prefetcher(), keeps], max_epochs=1)
    for kept, host in zip(keeps.batches, made, strict=True):
        assert torch.equal(kept[0], host[0])
        assert kept[0] is not host[0]


def test_a_hook_on_the_host_sees_the_host_batch() -> None:
    class Hooked(Small):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            assert batch[0] is self.expected[self.count % 5][0] or not self.trainer.training
            self.count += 1
            return batch

    made, module = batches(5), Hooked()
    module.expected, module.count = list(made), 0
    prefetch = prefetcher()
    fit(module, made, callbacks=[prefetch])
    assert module.count == 10
    assert prefetch.exchange is not None
    assert prefetch.exchange.exchanged == 10


def test_a_step_that_fails_leaves_no_thread() -> None:
    class Fails(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 2:
                raise RuntimeError("in the step")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="in the step"):
        fit(Fails(), batches(9), callbacks=[prefetcher()])


def test_on_another_device_it_says_so_and_changes_nothing() -> None:
    ours, plain = same_start(Small)
    prefetch = DevicePrefetcher()
    mine = fit(ours, batches(4), callbacks=[prefetch])
    assert prefetch.exchange is None
    assert prefetch.changes == []
    assert "batch_to_device" not in vars(mine.strategy)
    assert_same_state(mine, fit(plain, batches(4)))


def test_a_step_that_takes_the_iterator(recwarn: pytest.WarningsRecorder) -> None:
    class Takes(Small):
        def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:
            x, y = next(dataloader_iter)[0]
            return nn.functional.cross_entropy(self.net(x), y)

    prefetch = prefetcher()
    fit(Takes(), batches(3), callbacks=[prefetch])
    assert prefetch.changes == []
    assert any("the step takes the loader's iterator itself; nothing changes" in str(w.message) for w in recwarn)


def test_the_plan() -> None:
    room = DevicePrefetchOptimization(DevicePrefetchConfig())
    verdict = room.check(
        Context(Everything(), Data(), Hardware("cpu", "cpu", "a CPU", 2), example=ExampleBatch(Data()))
    )
    assert verdict == Refuses("copies beside the step need an NVIDIA GPU, and this run is on the CPU")
    gpu = Hardware("gpu", "cuda:0", "a GPU", 2)
    assert room.check(Context(Everything(), Data(), gpu)) == Applies("no batch to look at")

    class Texts(Data):
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(["a", "b"])  # type: ignore[arg-type]

    nothing = room.check(Context(Everything(), Texts(), gpu, example=ExampleBatch(Texts())))
    assert nothing == Refuses("there is no tensor in the batch that could be moved ahead")
    assert room.attach(Context(Everything(), Data(), gpu)).callbacks == [room.callback]
    assert room.applied() == room.outcome() == []


def test_what_happened_is_told() -> None:
    room = DevicePrefetchOptimization(DevicePrefetchConfig())
    room.callback = prefetcher()
    fit(Small(), batches(5), callbacks=[room.callback])
    assert [change.path for change in room.applied()] == ["train_dataloader"]
    (table,) = room.outcome()
    assert table.rows[0][:2] == (10, 0)
    assert table.rows[0][3] == 0, "nobody held a batch"
    assert 2 <= int(table.rows[0][2]) <= 2 * 6, "two tensors a batch; two ahead, one in use, one on its way, spares"


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"depth": 0}, "optimizations.device_prefetch.depth is 0; it must be at least 1."),
        (
            {"dtype": "half"},
            "optimizations.device_prefetch.dtype is 'half'; it must be one of float16, bfloat16, float32, float64, or "
            "null.",
        ),
    ],
)
def test_wrong_parameters(parameters: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DevicePrefetchConfig(**parameters)
    assert str(caught.value) == sentence
