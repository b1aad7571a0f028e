"""Batches moved ahead of the step: the same batches, in the same order, whatever the loader and however a fit ends."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from batch_structures import STRUCTURES
from everything import Data
from everything import Module as Everything
from graph_fits import Batches, Kept, Small, assert_same_state, batches, fit, same_start
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fasttrain.batches import flatten, map_tensors, tensors_in
from fasttrain.callbacks import CUDAGraphStep, DeviceBatches, DevicePrefetcher, DevicePrefetchOptimization
from fasttrain.callbacks.channels_last import batch_to_channels_last
from fasttrain.callbacks.device_prefetch.ahead import Ahead
from fasttrain.callbacks.device_prefetch.mover import DeviceMover
from fasttrain.callbacks.device_prefetch.optimization import DevicePrefetchConfig
from fasttrain.callbacks.device_prefetch.reference import TOLERANCE, moved_plainly
from fasttrain.callbacks.device_prefetch.streams import ImmediateStreams
from fasttrain.checkpoints import LAST
from fasttrain.config import CheckpointConfig
from fasttrain.environment import Hardware
from fasttrain.errors import ConfigError, DataError
from fasttrain.optimization import Applies, Context, ExampleBatch, Refuses
from fasttrain.order import EpochOrder, ResumableLoader, SampleKey
from fasttrain.resume import ResumePoint
from fasttrain.trainer import transform_batches

CPU = torch.device("cpu")


def prefetcher(**parameters: Any) -> DevicePrefetcher:
    return DevicePrefetcher(ImmediateStreams(CPU), **{"ahead": "always", **parameters})


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name == "device_prefetch"] == []


# ---- the body --------------------------------------------------------------------------------------------------------


def step_takes(mover: DeviceMover, batch: Any) -> Any:
    return mover.take(mover.move(batch), batch)


@pytest.mark.parametrize("make", STRUCTURES.values(), ids=STRUCTURES)
def test_any_structure_arrives_as_it_was(make: Callable[[], Any]) -> None:
    batch = make()
    arrived = step_takes(DeviceMover(ImmediateStreams(CPU)), batch)
    assert type(arrived) is type(batch)
    assert flatten(arrived)[1] == flatten(batch)[1]
    for tensor, host in zip(tensors_in(arrived), tensors_in(batch), strict=True):
        assert torch.equal(tensor, host)
        assert tensor.data_ptr() != host.data_ptr() or tensor.numel() == 0


IMAGES: dict[str, Callable[[], Tensor]] = {
    "images": lambda: torch.rand(2, 3, 4, 5),
    "bytes": lambda: torch.randint(256, (2, 3, 4, 5), dtype=torch.uint8),
    "volumes": lambda: torch.rand(2, 3, 4, 5, 6),
    "one channel": lambda: torch.rand(2, 1, 4, 5),
    "classes": lambda: torch.randint(9, (2, 3, 4, 5)),
    "channels_last": lambda: torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "strided": lambda: torch.rand(4, 3, 4, 10)[::2, :, :, ::2],
    "expanded": lambda: torch.rand(1, 3, 4, 5).expand(2, 3, 4, 5),
    "number": lambda: torch.tensor(3.5),
    "empty": lambda: torch.rand(0, 3, 4, 5),
}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("make", IMAGES.values(), ids=IMAGES)
def test_cast_and_layout_are_the_references(
    make: Callable[[], Tensor], channels_last: bool, dtype: torch.dtype | None
) -> None:
    mover = DeviceMover(ImmediateStreams(CPU), channels_last, dtype)
    for _ in range(3):  # into memory that was used before, too
        host = make()
        arrived, expected = step_takes(mover, [host])[0], moved_plainly(host, CPU, channels_last, dtype)
        tolerance = TOLERANCE.get(expected.dtype, 0.0)
        torch.testing.assert_close(arrived, expected, rtol=tolerance, atol=tolerance)
        assert arrived.is_contiguous(memory_format=torch.channels_last) or not channels_last or host.dim() != 4 or (
            host.dtype == torch.int64
        )  # fmt: skip
        if (
            host.is_contiguous()
        ):  # of others a view's strides are made dense, as `.to(device)` does from device to device
            assert arrived.stride() == expected.stride()


def test_the_layout_that_comes_later_is_made_at_once() -> None:
    mover = DeviceMover(ImmediateStreams(CPU), layouts=lambda: [batch_to_channels_last])
    arrived = step_takes(mover, {"images": torch.rand(2, 3, 4, 5), "labels": torch.arange(2)})
    assert batch_to_channels_last(arrived)["images"] is arrived["images"], "nothing is left to do"


def test_what_stays_on_the_host() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.rand(2), torch.rand(1)])
    leaf = torch.rand(2, requires_grad=True)
    sparse = torch.eye(2).to_sparse()
    batch = [packed, leaf, sparse, torch.rand(2)]
    arrived = step_takes(DeviceMover(ImmediateStreams(CPU)), batch)
    assert [one is other for one, other in zip(arrived, batch, strict=True)] == [True, True, True, False]


def test_memory_is_used_again_when_nobody_holds_it() -> None:
    mover = DeviceMover(ImmediateStreams(CPU))
    addresses = set()
    for value in range(10):
        moved = mover.move([torch.full((3,), float(value))])
        arrived = mover.take(moved, moved.batch)
        assert arrived[0].tolist() == [value] * 3
        addresses.add(arrived[0].data_ptr())
        mover.release(moved)
        del arrived, moved
    assert len(addresses) == mover.pool.made == 1
    assert mover.pool.left == 0


@pytest.mark.parametrize(
    "keep", [lambda x: x, lambda x: x[:1], lambda x: (x * torch.ones(3, requires_grad=True)).sum()]
)
def test_what_somebody_keeps_is_not_overwritten(keep: Callable[[Tensor], Any]) -> None:
    """A tensor of the batch, a view of it, or a loss whose backward needs it."""
    mover = DeviceMover(ImmediateStreams(CPU))
    kept = []
    for value in range(10):
        moved = mover.move([torch.full((3,), float(value))])
        kept.append(keep(mover.take(moved, moved.batch)[0]))
        mover.release(moved)
        del moved
    first = [float(each.detach().flatten()[0]) for each in kept]
    assert first in ([float(v) for v in range(10)], [3.0 * v for v in range(10)])
    assert mover.pool.made == 10
    assert mover.pool.left > 0, "the memory is theirs"


def test_changing_shapes_do_not_pile_up() -> None:
    mover = DeviceMover(ImmediateStreams(CPU))
    for rows in range(1, 200):
        moved = mover.move([torch.ones(rows), torch.ones(4)])
        mover.release(moved)
        del moved
    assert len(mover.pool._free) <= 17
    assert sum(map(len, mover.pool._free.values())) <= 20


def test_a_tensor_that_is_in_a_batch_twice_is_copied_once() -> None:
    host = torch.rand(3)
    mover = DeviceMover(ImmediateStreams(CPU))
    arrived = step_takes(mover, {"a": host, "b": host})
    assert arrived["a"] is arrived["b"]
    assert mover.pool.made == 1


@pytest.mark.parametrize("change", [
    lambda batch: batch.update(x=batch["x"] + 1),
    lambda batch: batch["x"].add_(1),
    lambda batch: batch.update(new=torch.ones(1)),
])  # fmt: skip
def test_what_a_hook_changed_after_it_was_moved_counts(change: Callable[[Any], Any]) -> None:
    mover = DeviceMover(ImmediateStreams(CPU), prepare=lambda batch: "prepared for the batch as it was")
    batch = {"x": torch.zeros(2), "y": torch.zeros(2)}
    moved = mover.move(batch)
    change(batch)
    arrived = mover.take(moved, batch)
    assert {key: value.tolist() for key, value in arrived.items()} == {k: v.tolist() for k, v in batch.items()}
    assert arrived["y"] is not batch["y"]


def test_any_loop() -> None:
    made = [{"x": torch.full((2, 3), float(i)), "name": str(i)} for i in range(7)]
    seen = [
        (batch["x"].mean().item(), batch["name"]) for batch in DeviceBatches(made, CPU, streams=ImmediateStreams(CPU))
    ]
    assert seen == [(float(i), str(i)) for i in range(7)]
    assert list(DeviceBatches([], CPU, streams=ImmediateStreams(CPU))) == []
    for batch in DeviceBatches(made, CPU, streams=ImmediateStreams(CPU)):
        if batch["name"] == "2":
            break  # the fixture sees that no thread is left
    with pytest.raises(ValueError, match=r"^depth is 0; at least 1 batch has to be ahead\.$"):
        DeviceBatches(made, CPU, depth=0, streams=ImmediateStreams(CPU))


# ---- the thread ------------------------------------------------------------------------------------------------------


def test_it_pulls_so_far_ahead_and_no_farther() -> None:
    pulled: list[int] = []
    arrived = threading.Semaphore(0)

    def pull() -> int:
        pulled.append(len(pulled))
        arrived.release()
        return pulled[-1]

    ahead = Ahead(pull, depth=2, most=5)
    assert arrived.acquire(timeout=10)
    assert arrived.acquire(timeout=10)
    assert not arrived.acquire(timeout=0.05)
    assert next(ahead) == 0
    assert arrived.acquire(timeout=10)
    assert not arrived.acquire(timeout=0.05)
    assert [next(ahead) for _ in range(4)] == [1, 2, 3, 4]
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(ahead)
    assert pulled == [0, 1, 2, 3, 4]
    ahead.stop()


def test_what_it_raises_comes_in_its_turn() -> None:
    items: list[Any] = [1, 2, DataError("image 3 is broken"), 4]

    def pull() -> Any:
        item = items.pop(0)
        if isinstance(item, Exception):
            raise item
        return item

    ahead = Ahead(pull, depth=3)
    assert [next(ahead), next(ahead)] == [1, 2]
    for _ in range(2):
        with pytest.raises(DataError, match="image 3 is broken"):
            next(ahead)
    assert items == [4]
    ahead.stop()


# ---- in a fit --------------------------------------------------------------------------------------------------------


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


class Numbers(Dataset[Tensor]):
    """Each sample is a function of the epoch and the index."""

    broken: int | None = None

    def __getitem__(self, key: SampleKey) -> Tensor:
        if key.index == self.broken and key.epoch == 1:
            raise DataError(f"image {key.index} is broken")
        return torch.tensor([float(100 * key.epoch + key.index)])

    def __len__(self) -> int:
        return 16


class Sees(pl.LightningModule):
    """Notes the samples of each step."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[list[float]] = []
        self.stop_at = stop_at

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(batch.flatten().tolist())
        self.trainer.should_stop |= len(self.seen) == self.stop_at
        return self.layer(batch).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Interrupts(pl.Callback):
    def __init__(self, point: ResumePoint, step: int | None) -> None:
        self.point, self.step = point, step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step + 1 == self.step:
            self.point.interrupt()


class Stream:
    """The same loader without a length."""

    def __init__(self, loader: ResumableLoader) -> None:
        self.loader = loader
        self.sampler = loader.sampler
        self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def see(
    folder: Path, stop: int | None = None, resume: bool = False, *, workers: int = 0, plain: bool = False,
    broken: int | None = None, stream: bool = False, **parameters: Any,
) -> Sees:  # fmt: skip
    module, data = Sees(), Numbers()
    data.broken = broken
    point = ResumePoint(folder, CheckpointConfig(every_n_minutes=None))
    loader: Any = ResumableLoader(data, EpochOrder(16, shuffle=True, seed=1), batch_size=2, num_workers=workers)
    callbacks = [] if plain else [prefetcher(**parameters)]
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=2, callbacks=[*callbacks, Interrupts(point, stop), point], logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module.error = None
    try:
        trainer.fit(module, Stream(loader) if stream else loader, ckpt_path=str(folder / LAST) if resume else None)
    except DataError as error:
        module.error = str(error)
    return module


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Sees:
    return see(tmp_path_factory.mktemp("whole"), plain=True)


# A stream's first batch is fetched by Lightning before it has set the epoch, so only the first epoch can be resumed.
@pytest.mark.parametrize(
    ("stop", "depth", "stream"),
    [(1, 3, False), (4, 1, False), (7, 3, False), (8, 3, False), (9, 2, False), (15, 3, False), (4, 2, True)],
)
def test_stopped_and_resumed_no_batch_is_lost_or_seen_twice(
    tmp_path: Path, whole: Sees, stop: int, depth: int, stream: bool
) -> None:
    first = see(tmp_path, stop, depth=depth, stream=stream)
    assert len(first.seen) == stop
    assert whole.seen == first.seen + see(tmp_path, resume=True, depth=depth, stream=stream).seen


def test_with_worker_processes_it_is_ahead_by_itself(tmp_path: Path, whole: Sees) -> None:
    first = see(tmp_path, 11, workers=1, ahead="auto")
    assert whole.seen == first.seen + see(tmp_path, resume=True, workers=1, ahead="auto").seen


def test_from_ahead_to_plain_and_back(tmp_path: Path, whole: Sees) -> None:
    first = see(tmp_path, 5)
    second = see(tmp_path, 10, resume=True, plain=True)
    assert whole.seen == first.seen + second.seen + see(tmp_path, resume=True).seen


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_sample_stops_the_fit_in_its_turn(tmp_path: Path, whole: Sees, workers: int) -> None:
    where = next(i for i, seen in enumerate(whole.seen) if 105.0 in seen)
    failed = see(tmp_path, broken=5, workers=workers, depth=3)
    assert failed.error == "image 5 is broken"
    assert failed.seen == whole.seen[:where]
    assert whole.seen == failed.seen + see(tmp_path, resume=True).seen, "what was computed before it is kept"


def test_stopped_early_in_the_middle_of_an_epoch() -> None:
    module = Sees(stop_at=3)
    loader = ResumableLoader(Numbers(), EpochOrder(16, shuffle=False, seed=0), batch_size=2, num_workers=1)
    fit(module, loader, callbacks=[prefetcher(depth=4, ahead="auto")])
    assert len(module.seen) == 3


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


# ---- the plan --------------------------------------------------------------------------------------------------------


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


def test_the_reference_leaves_other_leaves_alone() -> None:
    batch = {"x": torch.rand(2), "name": "a", "n": 3}
    assert map_tensors(moved_plainly(batch, CPU), torch.Tensor.tolist) == map_tensors(batch, torch.Tensor.tolist)
