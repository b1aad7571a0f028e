"""The parts of the graph step, each by itself: static inputs, padding, the pool, gradients, averaging, watching."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from batch_structures import Encoding, Masked, Point, Sample, some
from graph_fits import Batches, Small, assert_same_state, batches, fit, same_start
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_avg_fn

from fasttrain.batches import named_tensors, tensors_in
from fasttrain.callbacks import CUDAGraphStep
from fasttrain.callbacks.cuda_graph_step import PadConfig
from fasttrain.callbacks.cuda_graph_step.averaging import CapturedAveraging
from fasttrain.callbacks.cuda_graph_step.culprit import place_of, why_capture_failed
from fasttrain.callbacks.cuda_graph_step.gradients import Gradients
from fasttrain.callbacks.cuda_graph_step.padding import PadToSizes
from fasttrain.callbacks.cuda_graph_step.pool import GraphPool
from fasttrain.callbacks.cuda_graph_step.recording import EagerRecorder
from fasttrain.callbacks.cuda_graph_step.static_inputs import StaticInputs
from fasttrain.callbacks.cuda_graph_step.watch import HostWatch, Watch
from fasttrain.errors import ConfigError, OptimizationError

CPU = torch.device("cpu")


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


class AsksForGradients(Small):
    """Differentiates by its inputs, as physics-informed networks do."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x.requires_grad_(True)
        loss = nn.functional.cross_entropy(self.net(x), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()


def test_a_step_may_ask_for_gradients_of_its_inputs() -> None:
    trainers = []
    graph = CUDAGraphStep(stand_in=True)
    for module, step in zip(same_start(AsksForGradients), (graph, None), strict=True):
        trainers.append(fit(module, Batches([(x.clone(), y) for x, y in batches(12).made]), step))
    assert graph.pool.hits >= 10, graph.notes
    assert_same_state(*trainers)


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


@pytest.mark.parametrize(
    ("dimension", "shape"), [(0, (4, 3, 5)), (1, (2, 4, 5)), (2, (2, 3, 8)), (-1, (2, 3, 8)), (-3, (4, 3, 5))]
)
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


def test_batches_that_are_all_different_are_told_of() -> None:
    """File names or numbers of samples in a batch are values, of which a graph could have one built in."""

    class OfFiles(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch[:2], batch_idx)

    made = [(x, y, [f"{index}.jpg"]) for index, (x, y) in enumerate(batches(60).made)]
    graph = CUDAGraphStep(stand_in=True)
    with pytest.warns(UserWarning, match=r"signature: batch\[2\]\[0\] is '30.jpg', then '31.jpg'; leave out of"):
        fit(OfFiles(), Batches(made), graph, max_epochs=2)
    assert len(graph.pool.tallies) == 32


def with_gradients() -> tuple[list[nn.Parameter], torch.optim.Optimizer, Gradients]:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    for parameter in parameters[:2]:
        parameter.grad = torch.full((2,), 3.0)
    optimizer = torch.optim.SGD(parameters, 0.1)
    return parameters, optimizer, Gradients(optimizer)


def test_gradients_get_buffers_with_their_values() -> None:
    (one, other, without), _, gradients = with_gradients()
    gradients.make_static()
    assert [parameter for parameter, _ in gradients.static] == [one, other]
    assert without.grad is None, "an optimizer would move a parameter whose gradient is zero"
    buffer = one.grad
    one.grad = other.grad = None
    gradients.bind()
    assert one.grad is buffer
    one.grad, other.grad = torch.full((2,), 5.0), torch.full((2,), 6.0)
    gradients.bind()
    assert one.grad is buffer
    assert [one.grad.tolist(), other.grad.tolist()] == [[5.0, 5.0], [6.0, 6.0]]
    without.grad = torch.ones(2)
    gradients.make_static()
    assert len(gradients.static) == 3
    assert one.grad is buffer
    gradients.forget()
    assert gradients.static == []
    assert one.grad is buffer


def test_zeroing_in_place_is_for_the_time_of_a_step() -> None:
    (one, *_), optimizer, gradients = with_gradients()
    before = one.grad
    with gradients.zeroed_in_place():
        optimizer.zero_grad()
        assert one.grad is before
        assert before is not None
        assert before.tolist() == [0, 0]
    assert "zero_grad" not in vars(optimizer)
    optimizer.zero_grad()
    assert one.grad is None
    gradients.point_at([(one, torch.ones(2))])
    assert [(p is one, g.tolist()) for p, g in gradients.held()] == [(True, [1, 1])]
    gradients.drop()
    assert gradients.held() == []


AVERAGES: dict[str, Callable[[nn.Module], AveragedModel]] = {
    "swa": AveragedModel,
    "ema": lambda net: AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "ema with buffers": lambda net: AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
    "own function": lambda net: AveragedModel(net, avg_fn=get_swa_avg_fn()),
    "own, with buffers": lambda net: AveragedModel(net, avg_fn=lambda a, n, k: (a * k + n) / (k + 1), use_buffers=True),
}


@pytest.mark.parametrize("make", AVERAGES.values(), ids=AVERAGES)
def test_averaging_is_what_torch_does(make: Callable[[nn.Module], AveragedModel]) -> None:
    net: Any = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).double())
    ours, plain = make(net), make(net)
    averaging = CapturedAveraging(ours, net, EagerRecorder(), lambda note: pytest.fail(note))
    for step in range(8):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.randn_like(parameter))
        net[0:2](torch.randn(5, 3))
        ours.update_parameters(net)
        plain.update_parameters(net)
        for name, value in plain.state_dict().items():
            assert torch.equal(ours.state_dict()[name], value), f"{name} after {step + 1}"
        if step == 5:
            averaging.forget()
    assert averaging._recording is not None
    averaging.put_back()
    assert "update_parameters" not in vars(ours)


def test_averaging_that_can_not_be_captured_goes_on() -> None:
    class Refuses(EagerRecorder):
        def record(self, function: Any) -> Any:
            raise RuntimeError("no capture here. Not at all")

    net, notes = nn.Linear(2, 2), list[str]()
    ours, plain = AveragedModel(net), AveragedModel(net)
    CapturedAveraging(ours, net, Refuses(), notes.append)  # type: ignore[arg-type]
    for _ in range(6):
        with torch.no_grad():
            net.weight.mul_(1.5)
        ours.update_parameters(net)
        plain.update_parameters(net)
    assert torch.equal(ours.module.weight, plain.module.weight)
    assert len(notes) == 1
    assert notes[0].startswith("averaging the weights can't be captured: no capture here (at test_graph_parts.py:")


def failing() -> None:
    torch.ones(2, 3) @ torch.ones(2, 3)


def caught(function: Callable[[], Any]) -> Exception:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def in_a_chain(first: str, *then: str) -> Exception:
    """Return the last of exceptions of which each was raised while the one before was handled."""

    def raised(messages: tuple[str, ...]) -> None:
        if len(messages) == 1:
            raise RuntimeError(messages[0])
        try:
            raised(messages[:-1])
        except RuntimeError:
            raise RuntimeError(messages[-1])  # noqa: B904

    return caught(lambda: raised((first, *then)))


def test_the_user_s_line_is_named() -> None:
    error = caught(failing)
    line = failing.__code__.co_firstlineno + 1
    assert place_of(error) == f"test_graph_parts.py:{line}: torch.ones(2, 3) @ torch.ones(2, 3)"
    assert why_capture_failed(error).startswith("mat1 and mat2 shapes cannot be multiplied")
    assert why_capture_failed(error).endswith(f"(at {place_of(error)})")
    assert place_of(RuntimeError("never raised")) is None
    assert why_capture_failed(RuntimeError("never raised")) == "never raised"
    assert why_capture_failed(ValueError()) == "ValueError"


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            in_a_chain("CUDA error: operation not permitted when stream is capturing\nMore. And more"),
            "something in it needs the host to wait for the device, or CUDA can't capture it",
        ),
        (
            in_a_chain("cudaErrorStreamCaptureInvalidated"),
            "something in it needs the host to wait for the device, or CUDA can't capture it",
        ),
        (in_a_chain("in lines,\n  one\tafter another", "second"), "in lines, one after another"),
        (in_a_chain("the\n   cause. Then more", "the end of a capture", "a third"), "the cause"),
    ],
)
def test_the_first_exception_is_the_cause(error: Exception, sentence: str) -> None:
    said = why_capture_failed(error)
    assert said.split(" (at ")[0].split() == sentence.split()
    assert "test_graph_parts.py" in said


def test_an_exception_in_a_circle() -> None:
    one, other = RuntimeError("one"), RuntimeError("other")
    one.__context__, other.__context__ = other, one
    assert why_capture_failed(one) == "other"


def test_glances_see_parameters() -> None:
    module = Small()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    watch = Watch(module, optimizer)
    assert watch.glance() is None
    module.net[0].requires_grad_(False)
    assert watch.glance() == "net.0.weight was frozen"
    assert watch.glance() is None
    module.net[0].requires_grad_(True)
    assert watch.glance() == "net.0.weight was unfrozen"
    extra = nn.Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [extra]})
    assert watch.glance() == "a parameter was given to the optimizer"
    del optimizer.param_groups[1]
    assert watch.glance() == "the optimizer's parameter groups changed"


def test_looks_see_the_rest() -> None:
    module: Any = Small()
    module.temperature = 1.0
    watch = Watch(module, torch.optim.SGD(module.parameters(), 0.1))
    assert watch.look() is None
    module.net[0].weight.data = module.net[0].weight.data.clone()
    assert watch.look() == "net.0.weight lies at another address"
    module.net[1].eval()
    assert watch.look() == "net.1 was switched to eval"
    module.net[1].train()
    assert watch.look() == "net.1 was switched to train"
    module.temperature = 0.5
    assert watch.look() == "the attribute temperature changed from 1.0 to 0.5"
    module.temperature = torch.ones(1)
    assert watch.look() == "the attribute temperature changed from 0.5 to what is no plain value"
    assert watch.look() is None


def test_the_host_s_part_of_a_step_is_seen() -> None:
    module: Any = Small()
    module.calls = 0
    watch = HostWatch(module, torch.device("cuda"))

    def step(change: Callable[[], Any], numbers: Mapping[str, float] = MappingProxyType({})) -> str:
        watch.before()
        change()
        try:
            watch.after(numbers)
        except OptimizationError as error:
            return str(error)
        return ""

    def counts() -> None:
        module.calls += 1

    assert step(counts) == "", "what a step makes once is there when it is captured"
    assert step(lambda: None) == ""
    assert step(counts) == (
        "Small.training_step changes the attribute calls (from 1 to 2), which a replay would not; keep it in a tensor "
        "(register_buffer), or change it in on_train_batch_end"
    )
    assert step(lambda: torch.rand(1)) == (
        "Small.training_step draws random numbers on the host (torch), which a replay would repeat; draw them on the "
        "device (torch.rand(..., device=self.device)) or in the loader"
    )
    assert step(lambda: None, {"rate": 0.5}) == ""
    assert watch.numbers_to_tell() == [("rate", 0.5)]
    assert watch.numbers_to_tell() == []
    assert step(lambda: None, {"rate": 0.25}) == (
        "self.log('rate') is given a Python number that changes from step to step, and a replay would log the first "
        "one for ever; log a tensor, or log it in on_train_batch_end"
    )
    watch = HostWatch(module, CPU)
    assert step(lambda: torch.rand(1)) == "", "which is the device's generator there"
