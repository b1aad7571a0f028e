"""Captured optimizer steps on a GPU: replays equal eager prepared steps bit for bit while their numbers change."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from fasttrain.callbacks.cuda_graph_step.optimizer.capturable import CapturableOptimizer

pytestmark = pytest.mark.gpu

STEPS = 20
SHAPES = ((64, 3, 3, 3), (257, 129), (129,), ())
# Relative to a tensor's largest value: capturable implementations order their float32 operations otherwise.
PLAIN_TOLERANCE = 2e-5

TORCH_TIER: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (SGD, {"lr": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    (AdamW, {"lr": 0.01}),
    (AdamW, {"lr": 0.01, "fused": True}),
    (AdamW, {"lr": 0.01, "foreach": True}),
    (AdamW, {"lr": 0.01, "foreach": False}),
    (Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.01}),
    (Adam, {"lr": 0.01, "amsgrad": True, "foreach": True}),
    (RMSprop, {"lr": 0.01}),
    (RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True, "foreach": False}),
    (NAdam, {"lr": 0.01, "weight_decay": 0.01, "decoupled_weight_decay": True}),
    (NAdam, {"lr": 0.01, "foreach": False}),
    (RAdam, {"lr": 0.01, "betas": (0.9, 0.99)}),
    (Adamax, {"lr": 0.01}),
    (Adadelta, {"lr": 1.0}),
    (ASGD, {"lr": 0.01, "t0": 5}),
    (Rprop, {"lr": 0.01}),
]
DEVICE_TIER: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 1e-4}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.01}),
    (AdamW, {"lr": 0.01}),
    (AdamW, {"lr": 0.01, "fused": True}),
]


def made(cls: Any, options: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[Optimizer, list[Tensor]]:
    """Return an optimizer with two groups, and its gradients, which stay where they are in memory."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to("cuda", dtype)) for shape in SHAPES]
    params[0].data = params[0].data.contiguous(memory_format=torch.channels_last)
    gradients = []
    for param in params:
        param.grad = torch.zeros_like(param)
        gradients.append(param.grad)
    return cls([{"params": params[:2]}, {"params": params[2:], "lr": options["lr"] / 4}], **options), gradients


def write(gradients: list[Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(1 + step)
    for gradient in gradients:
        gradient.copy_(torch.randn(gradient.shape, generator=generator))


def eager(optimizer: Optimizer, capturable: CapturableOptimizer) -> None:
    with capturable.prepared():
        optimizer.step()


def captured(optimizer: Optimizer, capturable: CapturableOptimizer) -> torch.cuda.CUDAGraph:
    """Take a first step eagerly on a side stream, then capture one, which is not taken."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        eager(optimizer, capturable)
    torch.cuda.current_stream().wait_stream(stream)
    entries, generation = capturable.state_entries(), capturable.generation
    capturable.accept()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        eager(optimizer, capturable)
    assert (capturable.state_entries(), capturable.generation) == (entries, generation)
    assert capturable.changed_inside == ()
    return graph


def tensors_of(optimizer: Optimizer) -> dict[str, Tensor]:
    found = {}
    for index, param in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        found[f"parameter {index}"] = param.detach()
        found |= {f"{key} {index}": value for key, value in optimizer.state.get(param, {}).items()}
    return found


def assert_bits_equal(one: Optimizer, other: Optimizer) -> None:
    a, b = tensors_of(one), tensors_of(other)
    assert a.keys() == b.keys()
    unequal = [name for name in a if not torch.equal(a[name], b[name])]
    assert not unequal
    assert not any(tensor.isnan().any() for tensor in a.values())


def assert_close(one: Optimizer, other: Optimizer, tolerance: float = PLAIN_TOLERANCE) -> None:
    a, b = tensors_of(one), tensors_of(other)
    assert a.keys() == b.keys()
    for name, tensor in b.items():
        error = (a[name].cpu().double() - tensor.cpu().double()).abs().max() / tensor.abs().max().clamp_min(1e-3).cpu()
        assert error < tolerance, f"{name}: relative error {error:.1e}"


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("cls", "options"), TORCH_TIER)
def test_replays_with_a_changing_rate_equal_eager_steps(cls: type[Optimizer], options: dict[str, Any]) -> None:
    (graphed, its_gradients), (stepped, other_gradients), (plain, plain_gradients) = (
        made(cls, options) for _ in range(3)
    )
    device = torch.device("cuda", torch.cuda.current_device())
    ours, theirs = CapturableOptimizer(graphed, device), CapturableOptimizer(stepped, device)
    assert ours.problem() is None
    schedulers = [StepLR(each, 3, gamma=0.7) for each in (graphed, stepped, plain)]
    for gradients in (its_gradients, other_gradients, plain_gradients):
        write(gradients, 0)
    graph = captured(graphed, ours)
    eager(stepped, theirs)
    plain.step()
    for step in range(1, STEPS + 1):
        for scheduler in schedulers:
            scheduler.step()
        for gradients in (its_gradients, other_gradients, plain_gradients):
            write(gradients, step)
        with no_waiting():
            ours.upload()
            graph.replay()
        eager(stepped, theirs)
        plain.step()
    assert_bits_equal(graphed, stepped)
    assert_close(graphed, plain)
    assert [group["lr"] for group in graphed.param_groups] == [group["lr"] for group in plain.param_groups]
    assert all(type(group["lr"]) is float for group in graphed.param_groups)
    assert ours.constants_changed() == ()


@pytest.mark.parametrize(("cls", "options"), DEVICE_TIER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_replays_follow_a_cycled_momentum_and_a_decay(
    cls: type[Optimizer], options: dict[str, Any], dtype: torch.dtype
) -> None:
    (graphed, its_gradients), (stepped, other_gradients), (plain, plain_gradients) = (
        made(cls, options, dtype) for _ in range(3)
    )
    ours, theirs = (CapturableOptimizer(each, torch.device("cuda")) for each in (graphed, stepped))
    schedulers = [OneCycleLR(each, max_lr=options["lr"], total_steps=STEPS + 2) for each in (graphed, stepped, plain)]
    for each in (ours, theirs):
        each.use_device_values()
    for gradients in (its_gradients, other_gradients, plain_gradients):
        write(gradients, 0)
    graph = captured(graphed, ours)
    eager(stepped, theirs)
    plain.step()
    for step in range(1, STEPS + 1):
        for scheduler in schedulers:
            scheduler.step()
        for optimizer in (graphed, stepped, plain):
            for group in optimizer.param_groups:
                group["weight_decay"] *= 0.9
        for gradients in (its_gradients, other_gradients, plain_gradients):
            write(gradients, step)
        assert ours.constants_changed() == ()
        with no_waiting():
            ours.upload()
            graph.replay()
        eager(stepped, theirs)
        plain.step()
    assert_bits_equal(graphed, stepped)
    if dtype == torch.float32:
        assert_close(graphed, plain)


@pytest.mark.parametrize("device_values", [False, True])
@pytest.mark.parametrize(
    ("cls", "options"),
    [(SGD, {"lr": 0.1, "momentum": 0.9}), (AdamW, {"lr": 0.01}), (Adam, {"lr": 0.01, "amsgrad": True})],
)
def test_a_replay_skips_where_a_gradient_overflowed(
    cls: type[Optimizer], options: dict[str, Any], device_values: bool
) -> None:
    optimizer, gradients = made(cls, options)
    capturable = CapturableOptimizer(optimizer, torch.device("cuda"))
    capturable.use_device_values(device_values)
    assert capturable.honours_found_inf
    found_inf = torch.zeros((), device="cuda")
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    write(gradients, 0)
    graph = captured(optimizer, capturable)
    before = {name: tensor.clone() for name, tensor in tensors_of(optimizer).items()}
    gradients[1][3, 4] = torch.inf
    found_inf.fill_(1.0)
    graph.replay()
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(optimizer).items())
    write(gradients, 1)
    found_inf.fill_(0.0)
    graph.replay()
    for name, tensor in tensors_of(optimizer).items():
        if name.startswith(("parameter", "step", "momentum")):  # a largest second moment may stay
            assert not torch.equal(tensor, before[name])


@pytest.mark.parametrize("device_values", [False, True])
@pytest.mark.parametrize("options", [{"lr": 0.01}, {"lr": 0.01, "fused": True}, {"lr": 0.01, "capturable": True}])
def test_checkpoints_are_those_of_the_plain_optimizer(options: dict[str, Any], device_values: bool) -> None:
    (ours, gradients), (plain, plain_gradients) = made(AdamW, options), made(AdamW, options)
    for step in range(2):  # state that a plain optimizer made is taken over
        for optimizer, its_gradients in ((ours, gradients), (plain, plain_gradients)):
            write(its_gradients, step)
            optimizer.step()
    capturable = CapturableOptimizer(ours, torch.device("cuda"))
    capturable.use_device_values(device_values)
    eager(ours, capturable)
    plain.step()
    assert all(state["step"].is_cuda for state in ours.state.values())
    saved, wanted = ours.state_dict(), plain.state_dict()
    assert saved["param_groups"] == wanted["param_groups"]
    for index, state in wanted["state"].items():
        found = saved["state"][index]
        assert {key: (value.device, value.dtype) for key, value in found.items()} == {
            key: (value.device, value.dtype) for key, value in state.items()
        }
        assert found["step"] == state["step"]
    before = capturable.generation
    plain.load_state_dict(copy.deepcopy(saved))
    ours.load_state_dict(copy.deepcopy(wanted))
    assert capturable.generation != before
    eager(ours, capturable)
    plain.step()
    assert_close(ours, plain)
    capturable.release()
    assert all(
        a["step"].device == b["step"].device for a, b in zip(ours.state.values(), plain.state.values(), strict=True)
    )
    ours.step()
    plain.step()
    assert_close(ours, plain)


def test_an_eager_prepared_step_does_not_warn_that_it_is_capturable() -> None:
    optimizer = copy.deepcopy(made(RAdam, {"lr": 0.01})[0])  # a copy has forgotten that it is not to warn
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eager(optimizer, CapturableOptimizer(optimizer, torch.device("cuda")))
    assert not any(group["capturable"] for group in optimizer.param_groups)


def test_a_capture_does_not_take_numbers_that_were_not_uploaded() -> None:
    optimizer, gradients = made(AdamW, {"lr": 0.01})
    capturable = CapturableOptimizer(optimizer, torch.device("cuda"))
    write(gradients, 0)
    captured(optimizer, capturable)
    optimizer.param_groups[0]["lr"] = 0.5
    with (
        pytest.raises(AssertionError, match="what is written in a capture is baked in"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"),
    ):
        eager(optimizer, capturable)
    assert optimizer.param_groups[0]["lr"] == 0.5
    eager(optimizer, capturable)


class Descent(Optimizer):
    """A third party's optimizer that stays on the device; subclasses don't."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for param in group["params"]:
                self.update(param, group, self.state[param])
        return loss

    def update(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        buffer = state.setdefault("buffer", torch.zeros_like(param))
        buffer.mul_(0.9).add_(param.grad)
        param.sub_(buffer * group["lr"])


class CountsOnTheHost(Descent):
    def update(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state.setdefault("t", torch.zeros(())).add_(1)
        super().update(param, group, state)


class ReadsItsRate(Descent):
    def update(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.add_(param.grad, alpha=-group["lr"])


class CopiesToTheDevice(Descent):
    def update(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.sub_(param.grad * torch.full((), 0.1).to(param.device))


@pytest.mark.parametrize(
    ("cls", "start"),
    [
        (CountsOnTheHost, "CountsOnTheHost's state 't' is on cpu, where a replay on cuda:0 would not advance it"),
        (ReadsItsRate, "ReadsItsRate reads its learning rate on the host (test_graph_optimizer_gpu.py:"),
        (
            CopiesToTheDevice,
            "CopiesToTheDevice copies a value between the host and the device (test_graph_optimizer_gpu.py:",
        ),
    ],
)
def test_an_unknown_optimizer_is_refused_with_the_reason(cls: type[Optimizer], start: str) -> None:
    found = CapturableOptimizer(made(cls, {"lr": 0.1})[0], torch.device("cuda", 0)).problem()
    assert found is not None
    assert found.startswith(start)


def test_an_unknown_optimizer_that_is_accepted_replays() -> None:
    (graphed, its_gradients), (stepped, other_gradients) = made(Descent, {"lr": 0.1}), made(Descent, {"lr": 0.1})
    ours, theirs = (CapturableOptimizer(each, torch.device("cuda")) for each in (graphed, stepped))
    memory = torch.cuda.memory_allocated()
    assert ours.problem() is None
    assert torch.cuda.memory_allocated() == memory
    for gradients in (its_gradients, other_gradients):
        write(gradients, 0)
    graph = captured(graphed, ours)
    eager(stepped, theirs)
    for step in range(1, 6):
        for optimizer, gradients in ((graphed, its_gradients), (stepped, other_gradients)):
            write(gradients, step)
            optimizer.param_groups[0]["lr"] /= 2
        ours.upload()
        graph.replay()
        eager(stepped, theirs)
    assert_bits_equal(graphed, stepped)
