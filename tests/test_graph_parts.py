"""The parts of the graph step, each by itself, and a replay that is not what the eager step computes."""

import copy
import sys
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from graph_fits import Batches, Small, assert_same_state, batches, fit, same_start
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_avg_fn
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC

from fasttrain.batches import OpaqueLeaf, flatten, map_tensors, named_tensors, tensors_in
from fasttrain.callbacks import CUDAGraphStep
from fasttrain.callbacks.cuda_graph_step import PadConfig
from fasttrain.callbacks.cuda_graph_step.averaging import CapturedAveraging
from fasttrain.callbacks.cuda_graph_step.carried import CarriedState, hanging_tensors
from fasttrain.callbacks.cuda_graph_step.culprit import place_of, why_capture_failed
from fasttrain.callbacks.cuda_graph_step.gradients import Gradients
from fasttrain.callbacks.cuda_graph_step.padding import PadToSizes
from fasttrain.callbacks.cuda_graph_step.pool import GraphPool
from fasttrain.callbacks.cuda_graph_step.recording import EagerRecorder, Reexecution
from fasttrain.callbacks.cuda_graph_step.self_check import Difference, Snapshot, beyond_noise, compare_replay
from fasttrain.callbacks.cuda_graph_step.static_inputs import StaticInputs
from fasttrain.callbacks.cuda_graph_step.watch import HostWatch, Watch
from fasttrain.errors import ConfigError, OptimizationError

CPU = torch.device("cpu")

# Batches of any structure


class Point(NamedTuple):
    x: Tensor
    name: str


@dataclass
class Sample:
    image: Tensor
    boxes: list[Tensor]
    size: int = 3


@dataclass(frozen=True, slots=True)
class Frozen:
    image: Tensor
    label: int


@dataclass
class Masked:
    """Computes more than its fields, as collators do."""

    ids: Tensor
    mask: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.mask = self.ids > 0
        self.length = self.ids.sum(1)


class Encoding(UserDict):  # type: ignore[type-arg]
    """What transformers' tokenizers return is made like this: data, and more that a copy keeps."""

    def __init__(self, data: dict[str, Any], encodings: Any) -> None:
        super().__init__(data)
        self.encodings = encodings


class Output(OrderedDict):  # type: ignore[type-arg]
    """A dict whose constructor takes something else, like transformers' ModelOutput."""

    def __init__(self, loss: Tensor) -> None:
        super().__init__()
        self["loss"] = loss


class Split(Enum):
    TRAIN = 1


def some(*shape: int) -> Tensor:
    return torch.rand(*shape)


STRUCTURES: dict[str, Callable[[], Any]] = {
    "tensor": lambda: some(2),
    "nested": lambda: [some(2), (some(3), {"a": [some(1)], "b": None}), 2.5, "text", Split.TRAIN],
    "named tuple": lambda: Point(some(2), "p"),
    "dataclass": lambda: Sample(some(2), [some(1), some(4)]),
    "frozen": lambda: Frozen(some(2), 3),
    "computed": lambda: Masked(torch.ones(2, 3, dtype=torch.int64)),
    "encoding": lambda: Encoding({"input_ids": some(2), "labels": some(3)}, "kept"),
    "output": lambda: Output(some(2)),
    "ordered": lambda: OrderedDict(b=some(1), a=some(2)),
    "default": lambda: defaultdict(list, {"a": some(1)}),
    "proxy": lambda: MappingProxyType({"a": some(1)}),
    "torch's": lambda: [torch.Size([1, 2]), torch.float32, CPU, some(1)],
}


@pytest.mark.parametrize("make", STRUCTURES.values(), ids=STRUCTURES)
def test_structures_are_looked_into_and_kept(make: Callable[[], Any]) -> None:
    batch = make()
    tensors = list(tensors_in(batch))
    leaves, signature = flatten(batch)
    assert len(tensors) == len(leaves) >= 1
    assert all(one is other for one, other in zip(tensors, leaves, strict=True))
    changed = map_tensors(batch, lambda tensor: tensor + 1)
    assert type(changed) is type(batch)
    for tensor, new in zip(tensors, tensors_in(changed), strict=True):
        assert torch.equal(new, tensor + 1)
    assert all(one is other for one, other in zip(tensors_in(batch), tensors, strict=True)), "the batch is as it was"
    assert flatten(map_tensors(batch, torch.clone))[1] == signature
    assert hash(signature) == hash(flatten(make())[1])
    assert flatten(make())[1] == signature
    assert len({place for place, _ in named_tensors(batch)}) == len(tensors)


def test_a_copy_keeps_what_else_a_batch_holds() -> None:
    encoding = STRUCTURES["encoding"]()
    other = map_tensors(encoding, torch.clone)
    assert other.encodings == "kept"
    assert other.data is not encoding.data
    assert list(STRUCTURES["nested"]()[1][1]) == ["a", "b"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([some(2)], (some(2),)),
        ({"a": some(2)}, {"b": some(2)}),
        ({"a": some(2), "b": some(2)}, {"b": some(2), "a": some(2)}),
        ([some(2)], [some(2).double()]),
        ([some(2, 1)], [some(1, 2)]),
        ([some(2), 1], [some(2), True]),
        ([some(2), 1], [some(2), 1.0]),
        ([some(2), None], [some(2)]),
        (Sample(some(1), [], 3), Sample(some(1), [], 4)),
        (Point(some(1), "a"), Point(some(1), "b")),
        (Point(some(1), "a"), (some(1), "a")),
    ],
)
def test_signatures_differ(one: Any, other: Any) -> None:
    assert flatten(one)[1] != flatten(other)[1]


def test_a_signature_reads_as_shapes() -> None:
    batch = {"ids": torch.zeros(2, 3, dtype=torch.int64), "rest": [some(4), 1]}
    assert str(flatten(batch)[1]) == "int64[2, 3] float32[4]"
    assert [place for place, _ in named_tensors(batch)] == ["ids", "rest.0"]
    assert [place for place, _ in named_tensors([Point(some(1), ""), Sample(some(1), [some(1)])])] == [
        "0.x", "1.image", "1.boxes.0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        ([1, {"a": object()}], "batch[1]['a'] is a builtins.object"),
        (Sample(some(1), [object()]), "batch.boxes[0] is a builtins.object"),  # type: ignore[list-item]
        ([nn.utils.rnn.pack_sequence([some(2), some(1)])], "batch[0] is a torch.nn.utils.rnn.PackedSequence"),
    ],
)
def test_opaque_leaves_are_named(batch: Any, sentence: str) -> None:
    with pytest.raises(OpaqueLeaf) as caught:
        flatten(batch)
    assert str(caught.value) == sentence


# Static inputs


def test_static_inputs_keep_layout_and_address() -> None:
    image = some(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    expanded, sliced = some(1, 4).expand(3, 4), some(4, 6)[:, ::2]
    static = StaticInputs({"image": image, "rest": [expanded, sliced]}, CPU)
    assert static.batch["image"].is_contiguous(memory_format=torch.channels_last)
    assert all(tensor.stride() != (0, 1) for tensor in static.tensors)
    addresses = [tensor.data_ptr() for tensor in static.tensors]
    assert [torch.equal(a, b) for a, b in zip(static.tensors, [image, expanded, sliced], strict=True)] == [True] * 3
    new = [some(2, 3, 4, 4), some(3, 4), some(4, 3)]
    static.copy_from(new)
    assert [torch.equal(a, b) for a, b in zip(static.tensors, new, strict=True)] == [True] * 3
    assert [tensor.data_ptr() for tensor in static.tensors] == addresses
    assert static.batch["rest"][0] is static.tensors[1]


def test_static_inputs_have_their_own_dtype_device_and_history() -> None:
    needs_gradient = some(3).requires_grad_()
    static = StaticInputs([needs_gradient], CPU)
    assert not static.tensors[0].requires_grad
    static.copy_from([some(3).double()])
    assert static.tensors[0].dtype is torch.float32
    assert StaticInputs(Sample(some(2), []), torch.device("meta")).batch.image.is_meta
    with pytest.raises(ValueError, match="zip"):
        static.copy_from([])


def test_static_inputs_hold_what_a_dataclass_computed() -> None:
    static = StaticInputs(Masked(torch.tensor([[1, 0], [2, 3]])), CPU)
    static.copy_from(list(tensors_in(Masked(torch.tensor([[0, 0], [5, 0]])))))
    assert static.batch.mask.tolist() == [[False, False], [True, False]]
    assert static.batch.length.tolist() == [0, 5]


# Padding


def pad(batch: Any, values: Mapping[str, float], sizes: tuple[int, ...] = (4, 8), dimension: int = 1) -> Any:
    return PadToSizes(PadConfig(dict(values), sizes, dimension), lambda: True)(batch)


def test_padding_takes_the_smallest_size_that_holds_it() -> None:
    for length, padded in ((1, 4), (4, 4), (5, 8), (8, 8), (9, 9)):
        batch = {"ids": torch.ones(2, length, dtype=torch.int64), "labels": torch.ones(2, length), "id": some(2)}
        made = pad(batch, {"ids": 0, "labels": -100}, sizes=(8, 4))
        assert made["ids"].shape == made["labels"].shape == (2, padded)
        assert made["ids"].dtype is torch.int64
        assert torch.equal(made["ids"][:, :length], batch["ids"])
        assert made["ids"][:, length:].eq(0).all()
        assert made["labels"][:, length:].eq(-100).all()
        assert made["id"] is batch["id"]


@pytest.mark.parametrize(
    ("batch", "name"),
    [
        ([some(2, 3)], "0"),
        ((some(1), {"x": some(2, 3)}), "1.x"),
        (Point(some(2, 3), "p"), "x"),
        (Sample(some(2, 3), []), "image"),
        (Sample(some(1, 1), [some(2, 3)]), "boxes.0"),
        (Encoding({"x": some(2, 3)}, "kept"), "x"),
        (defaultdict(list, {"x": some(2, 3)}), "x"),
        (OrderedDict(x=some(2, 3)), "x"),
        ({1: some(2, 3)}, "1"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_padding_finds_its_place_in_any_structure(batch: Any, name: str) -> None:
    made = pad(batch, {name: 7})
    assert type(made) is type(batch)
    padded = dict(named_tensors(made))[name]
    assert padded.shape == (2, 4)
    assert padded[:, 3].eq(7).all()


@pytest.mark.parametrize(("dimension", "shape"), [(0, (4, 3, 5)), (1, (2, 4, 5)), (2, (2, 3, 8)), (-1, (2, 3, 8)), (-3, (4, 3, 5))])
def test_padding_a_dimension(dimension: int, shape: tuple[int, ...]) -> None:
    batch = some(2, 3, 5)
    made = pad([batch], {"0": 0}, dimension=dimension)[0]
    assert made.shape == shape
    assert torch.equal(made[:2, :3, :5], batch)


def test_padding_rests_in_an_evaluation() -> None:
    batch = [some(2, 3)]
    assert PadToSizes(PadConfig({"0": 0}, (4,)), lambda: False)(batch) is batch


@pytest.mark.parametrize(
    ("values", "sizes", "dimension", "sentence"),
    [
        (
            {"lables": 0}, (4,), 1,
            "cuda_graph_step.pad.values names 'lables', which is not in the batch; did you mean 'labels'?",
        ),
        (
            {"labels": 0}, (4,), 2,
            "cuda_graph_step.pad.dimension is 2, and 'labels' has the shape [2, 3]; leave it out of pad.values, or "
            "name a dimension that all of them have.",
        ),
        (
            {"scale": 0}, (4,), 0,
            "cuda_graph_step.pad.dimension is 0, and 'scale' has the shape []; leave it out of pad.values, or name a "
            "dimension that all of them have.",
        ),
    ],
)  # fmt: skip
def test_padding_that_is_not_possible(
    values: dict[str, float], sizes: tuple[int, ...], dimension: int, sentence: str
) -> None:
    with pytest.raises(OptimizationError) as caught:
        pad({"labels": some(2, 3), "scale": torch.tensor(1.0)}, values, sizes, dimension)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(("sizes", "values"), [((), {"x": 0.0}), ((4,), {}), ((4, 0), {"x": 0.0})])
def test_padding_without_sizes_or_inputs(sizes: tuple[int, ...], values: dict[str, float]) -> None:
    with pytest.raises(ConfigError) as caught:
        PadToSizes(PadConfig(values, sizes), lambda: True)
    assert str(caught.value) == (
        "optimizations.cuda_graph_step.pad needs `sizes`, like [128, 256, 512], and `values`, like "
        f"{{input_ids: 0, labels: -100}}; it has sizes {list(sizes)} and values {values}."
    )


# The pool


class Thing:
    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


def filled(*keys: str, **options: int) -> tuple[GraphPool[Thing], dict[str, Thing]]:
    pool: GraphPool[Thing] = GraphPool(**options)
    things = {key: Thing() for key in keys}
    for key, thing in things.items():
        pool.add(key, thing)
    return pool, things


def test_the_pool_warms_up_once_and_every_signature_a_little() -> None:
    pool: GraphPool[Thing] = GraphPool(warm_up=3, eager_first=2)
    due = []
    for key in ("a", "b", "a", "a", "b", "b", "c"):
        due.append(pool.is_due(key))
        pool.count_eager(key)
    assert due == [False, False, False, True, False, True, False]
    assert pool.find("a") is None
    pool.add("a", Thing())
    assert pool.find("a") is not None
    assert (pool.hits, pool.captures, pool.evictions, len(pool)) == (1, 1, 0, 1)
    pool.clear()
    assert not pool.is_due("a"), "everything is warmed up anew"
    for _ in range(3):
        pool.count_eager("d")
    assert pool.is_due("a"), "and what was seen stays seen"


def test_the_one_unused_for_longest_makes_room() -> None:
    pool, things = filled("a", "b", "c", capacity=3)
    pool.find("a")
    pool.add("d", Thing())
    assert [things[key].released for key in "abc"] == [0, 1, 0]
    assert pool.find("b") is None
    assert pool.tallies["b"].evictions == pool.evictions == 1
    pool.add("e", Thing())
    assert things["c"].released == 1
    pool.clear()
    assert things["a"].released == 1
    assert len(pool) == 0


def test_a_pool_that_thrashes_stops_to_capture() -> None:
    pool: GraphPool[Thing] = GraphPool(capacity=2, warm_up=0, eager_first=0)
    captured = 0
    for step in range(100):
        key = step % 5
        if pool.find(key) is None and pool.is_due(key):
            pool.add(key, Thing())
            captured += 1
    assert captured == 7, "two graphs, and five that made room for others"
    assert pool.is_thrashing
    for _ in range(70):
        pool.find(0), pool.find(1)
    assert not pool.is_thrashing, "graphs that are used pay for a few that were thrown out"


def test_a_pool_without_room() -> None:
    with pytest.raises(ConfigError) as caught:
        CUDAGraphStep(max_graphs=0)
    assert str(caught.value) == (
        "optimizations.cuda_graph_step.max_graphs is 0, and a step needs at least one graph; leave cuda_graph_step out "
        "to run every step eagerly."
    )


# The check of a replay


class State:
    """A step on two tensors, done rightly or wrongly."""

    def __init__(self) -> None:
        self.tensors = {"weight": torch.ones(3), "count": torch.zeros((), dtype=torch.int64)}
        self.ran: list[str] = []
        self.noise = iter([0.0] * 10)

    def step(self, name: str, change: float = 0.0) -> Callable[[], None]:
        def run() -> None:
            self.ran.append(name)
            self.tensors["weight"].mul_(2 + change + next(self.noise))
            self.tensors["count"].add_(1)

        return run

    def compare(self, change: float = 0.0, **options: Any) -> Any:
        return compare_replay(lambda: self.tensors, self.step("eager"), self.step("replay", change), **options)


def test_a_right_replay_is_run_once_after_one_eager_step() -> None:
    state = State()
    verdict = state.compare()
    assert (verdict.unexplained, verdict.worst_noise, verdict.was_made) == (None, 0.0, True)
    assert state.ran == ["eager", "replay"]
    assert state.tensors["weight"].tolist() == [2.0] * 3
    assert state.tensors["count"] == 1


def test_a_wrong_replay_is_found_and_the_eager_result_stays() -> None:
    state = State()
    verdict = state.compare(change=0.5)
    assert str(verdict.unexplained) == "weight differs by up to 0.5 (relative 0.25)"
    assert state.ran == ["eager", "replay", "eager"]
    assert state.tensors["weight"].tolist() == [2.0] * 3
    assert state.tensors["count"] == 1


@pytest.mark.parametrize(("change", "explained"), [(0.003, True), (0.009, False)])
def test_noise_explains_four_times_itself(change: float, explained: bool) -> None:
    state = State()
    state.noise = iter([0.0, 0.0, 0.002])  # eager, replay, eager
    verdict = state.compare(change)
    assert (verdict.unexplained is None) == explained
    assert verdict.worst_noise == pytest.approx(0.001, rel=0.01)
    assert state.tensors["count"] == 1
    assert state.tensors["weight"][0] == pytest.approx(2 + change if explained else 2.002)


def test_noise_without_a_measure_explains_its_own_tensor_only() -> None:
    endless, small = float("inf"), 0.1
    one, other = Difference("one", 1.0, small), Difference("other", 1.0, endless)
    assert beyond_noise({"one": one}, {}) is one
    assert beyond_noise({"one": one}, {"one": one}) is None
    assert beyond_noise({"one": one}, {"other": other}) is one
    assert beyond_noise({"other": other}, {"other": other}) is None
    assert beyond_noise({"other": other}, {"one": one}) is other
    assert beyond_noise({}, {"one": one}) is None


@pytest.mark.parametrize(
    ("now", "before", "largest"),
    [
        ([1.0, float("nan")], [1.0, float("nan")], None),
        ([1.0, float("nan")], [1.0, 2.0], float("inf")),
        ([1.0, 2.0], [1.0, float("nan")], float("inf")),
        ([float("inf")], [float("inf")], None),
        ([float("inf")], [1.0], float("inf")),
        ([0.0], [-0.0], None),
        ([0.0], [1e-40], 1e-40),
        ([1 + 1j], [1 + 2j], 1.0),
        ([complex("nan")], [complex("nan")], None),
        ([1, 2], [1, 5], 3.0),
        ([True], [False], 1.0),
        ([], [], None),
    ],
)
def test_what_counts_as_different(now: list[Any], before: list[Any], largest: float | None) -> None:
    found = Snapshot({"x": torch.tensor(before)}).differences({"x": torch.tensor(now)})
    assert [each.largest for each in found.values()] == pytest.approx([] if largest is None else [largest])


def test_differences_come_with_the_worst_first() -> None:
    before = Snapshot({"small": torch.ones(2), "large": torch.ones(2), "same": torch.ones(2)})
    found = before.differences({"small": torch.ones(2) + 0.1, "large": torch.ones(2) + 1, "same": torch.ones(2)})
    assert list(found) == ["large", "small"]
    assert str(found["large"]) == "large differs by up to 1 (relative 1)"


@pytest.mark.parametrize(
    ("snapshot", "ran", "weight"),
    [(1, ["replay"], 2.5), (2, ["eager", "replay"], 2.5), (3, ["eager", "replay"], 2.5)],
    ids=["first", "second", "third"],
)
def test_without_memory_the_replay_stands_unchecked(
    snapshot: int, ran: list[str], weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = 0
    plain = Snapshot.__init__

    def init(self: Snapshot, tensors: Mapping[str, Tensor]) -> None:
        nonlocal taken
        taken += 1
        if taken == snapshot:
            raise torch.OutOfMemoryError
        plain(self, tensors)

    monkeypatch.setattr(Snapshot, "__init__", init)
    state = State()
    verdict = state.compare(change=0.5)
    assert (verdict.was_made, verdict.unexplained) == (False, None)
    assert state.ran == ran
    assert state.tensors["weight"].tolist() == [weight] * 3
    assert state.tensors["count"] == 1


@pytest.mark.parametrize("where", ["before", "differs", "unexplained"])
def test_another_process_is_heard(where: str) -> None:
    """All processes run the same steps, because these call collectives, and keep the same state."""
    asked: list[bool] = []
    order = ["before", "eager", "differs", "after", "unexplained"]

    def anyone(here: bool) -> bool:
        asked.append(here)
        return here or order[len(asked) - 1] == where or (where == "unexplained" and order[len(asked) - 1] == "differs")

    state = State()
    verdict = state.compare(anyone=anyone)
    assert not any(asked)
    if where == "before":
        assert (state.ran, verdict.was_made) == (["replay"], False)
    elif where == "differs":
        assert (state.ran, verdict.unexplained) == (["eager", "replay", "eager"], None)
    else:
        assert state.ran == ["eager", "replay", "eager"]
        assert verdict.unexplained == "another process found a difference"
    assert state.tensors["count"] == 1
