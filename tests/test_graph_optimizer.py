"""A torch optimizer prepared for capture, on the CPU: its numbers, what others see of it, which can't be captured."""

import copy
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from inspect import currentframe
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CyclicLR,
    ExponentialLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from fasttrain.callbacks.cuda_graph_step.optimizer.capturable import CapturableOptimizer, cycles_momentum
from fasttrain.callbacks.cuda_graph_step.optimizer.dry_step import LEARNING_RATE, HostReads, dry_step_problem
from fasttrain.callbacks.cuda_graph_step.optimizer.recipes import RECIPES, known_class, recipe_for
from fasttrain.errors import OptimizationError

CPU = torch.device("cpu")
ALL: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (SGD, {}),
    (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (SGD, {"momentum": 0.9, "fused": True}),
    (Adam, {"weight_decay": 0.01}),
    (Adam, {"amsgrad": True, "maximize": True}),
    (AdamW, {}),
    (AdamW, {"fused": True}),
    (AdamW, {"foreach": True}),
    (NAdam, {"weight_decay": 0.01, "decoupled_weight_decay": True}),
    (RAdam, {"weight_decay": 0.01}),
    (Adamax, {"weight_decay": 0.01}),
    (RMSprop, {"momentum": 0.9, "centered": True}),
    (RMSprop, {"weight_decay": 0.01}),
    (Adadelta, {"weight_decay": 0.01}),
    (ASGD, {"weight_decay": 0.01, "t0": 3}),
    (Rprop, {}),
]


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (3,), (2, 2))]


def set_gradients(optimizer: Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(1 + step)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.randn(parameter.shape, generator=generator)


def two(cls: Any, **options: Any) -> tuple[Optimizer, Optimizer, CapturableOptimizer]:
    """Return a plain optimizer, one to be prepared, with the same numbers, and its preparation. Two groups each."""
    made = []
    for _ in range(2):
        first, second, third = parameters()
        groups = [{"params": [first, second]}, {"params": [third], "lr": 0.003}]
        made.append(cls(groups, **{"lr": 0.01, **options}))
    return made[0], made[1], CapturableOptimizer(made[1], CPU)


def train(
    plain: Optimizer,
    ours: Optimizer,
    capturable: CapturableOptimizer,
    steps: int,
    between: Callable[[Optimizer, int], None] = lambda optimizer, step: None,
) -> None:
    """Step both, the second one inside `prepared()`; `between` is called with each after each step."""
    for step in range(steps):
        for optimizer in (plain, ours):
            set_gradients(optimizer, step)
        plain.step()
        with capturable.prepared():
            ours.step()
        for optimizer in (plain, ours):
            between(optimizer, step)


def flat(optimizer: Optimizer) -> dict[str, Tensor]:
    found = {}
    for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        found[f"parameter {index}"] = parameter.detach()
        found |= {f"{key} {index}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return found


def assert_equal(one: Optimizer, other: Optimizer, tolerance: float = 0.0) -> None:
    a, b = flat(one), flat(other)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].device == b[name].device
        assert a[name].dtype == b[name].dtype
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance, msg=f"{name} differs")


@pytest.mark.parametrize(("cls", "options"), ALL)
def test_prepared_steps_equal_plain_ones_bit_for_bit(cls: type[Optimizer], options: dict[str, Any]) -> None:
    plain, ours, capturable = two(cls, **options)
    assert capturable.problem() is None
    schedulers = {id(plain): StepLR(plain, 3), id(ours): StepLR(ours, 3)}

    def between(optimizer: Optimizer, step: int) -> None:
        schedulers[id(optimizer)].step()
        if step == 7:
            optimizer.param_groups[1]["lr"] *= 3  # as a callback would

    train(plain, ours, capturable, 12, between)
    assert_equal(plain, ours)
    assert [group["lr"] for group in ours.param_groups] == [group["lr"] for group in plain.param_groups]


@pytest.mark.parametrize(("cls", "options"), ALL)
@pytest.mark.parametrize("foreach", [None, False, True])
def test_recipes_for_a_gpu_read_nothing_on_the_host(
    cls: type[Optimizer], options: dict[str, Any], foreach: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if options.keys() & {"fused", "foreach"}:
        return
    # The capturable paths themselves run on any device; only a check at their beginning keeps the CPU out.
    module = sys.modules["torch.optim.adam" if cls is AdamW else cls.__module__]
    monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda **_: ["cpu"], raising=cls is not SGD)
    optimizer = cls(parameters(), foreach=foreach, **options)  # type: ignore[arg-type, call-arg]
    (group,) = optimizer.param_groups
    group.update(recipe_for(optimizer).flags_for(group, torch.device("cuda")))
    group["lr"] = torch.tensor(0.01)
    set_gradients(optimizer, 0)
    optimizer.step()
    with HostReads([(group["lr"], LEARNING_RATE)], CPU) as reads:
        optimizer.step()
    assert reads.problems == {}


def test_the_fused_kernel_is_used_where_the_user_left_it_open() -> None:
    def flags(options: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, bool]:
        group = AdamW([torch.zeros(3, dtype=dtype, requires_grad=True)], **options).param_groups[0]
        return RECIPES[AdamW].flags_for(group, torch.device("cuda", 0))

    assert flags({}) == {"capturable": True, "fused": True}
    assert flags({"foreach": True}) == {"capturable": True}
    assert flags({"fused": False}) == {"capturable": True}
    assert flags({}, torch.complex64) == {"capturable": True}


def test_groups_hold_numbers_between_steps_and_tensors_within() -> None:
    _, ours, capturable = two(AdamW)
    groups, dicts = ours.param_groups, list(ours.param_groups)
    set_gradients(ours, 0)
    with capturable.prepared():
        inside = [group["lr"] for group in ours.param_groups]
        with capturable.prepared():  # Lightning's own step within
            ours.step()
    assert all(isinstance(lr, Tensor) for lr in inside)
    assert [lr.item() for lr in inside] == [0.01, 0.003]
    assert ours.param_groups is groups
    assert all(one is other for one, other in zip(ours.param_groups, dicts, strict=True))
    assert [group["lr"] for group in groups] == [0.01, 0.003]
    assert all(type(group["lr"]) is float for group in groups)
    assert "_init_group" not in vars(ours)
    groups[0]["lr"] = 0.5
    capturable.upload()
    assert [lr.item() for lr in inside] == [0.5, 0.003]  # the tensors that a graph would read


def test_host_values_are_back_when_a_step_raises() -> None:
    _, ours, capturable = two(SGD, momentum=0.9)

    def closure() -> float:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"), capturable.prepared():
        ours.step(closure)
    assert ours.param_groups[0]["lr"] == 0.01
    assert "_init_group" not in vars(ours)
    train(two(SGD, momentum=0.9)[0], ours, capturable, 2)
    assert ours.state


def test_what_the_step_itself_writes_is_kept_and_named() -> None:
    _, ours, capturable = two(AdamW)

    def closure() -> float:
        ours.param_groups[0]["lr"] = 0.25  # a warm-up in an overridden optimizer_step does this
        ours.param_groups[1]["lr"] *= 2
        return 0.0

    set_gradients(ours, 0)
    with capturable.prepared():
        ours.step(closure)
    assert [group["lr"] for group in ours.param_groups] == [0.25, 0.006]
    assert capturable.changed_inside == ("lr of parameter group 0", "lr of parameter group 1")
    ours.param_groups[1]["lr"] = 0.003  # what its tensor was given last, before the step wrote to it
    with capturable.prepared():
        assert [group["lr"].item() for group in ours.param_groups] == [0.25, 0.003]
    assert capturable.changed_inside == ()


def test_a_rewrite_of_the_same_bits_is_no_change() -> None:
    _, ours, capturable = two(AdamW)
    with capturable.prepared():
        lr = ours.param_groups[0]["lr"]
        torch.where(torch.tensor(True), lr.clone(), lr, out=lr)  # as a loss scaler puts a skipped step back
    assert capturable.changed_inside == ()
    assert ours.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize("cls", [SGD, Adam, AdamW])
def test_device_values_follow_a_cycled_momentum_and_a_decay_schedule(cls: type[Optimizer]) -> None:
    plain, ours, capturable = two(cls, weight_decay=0.1, **({"momentum": 0.9} if cls is SGD else {}))
    schedulers = {id(each): OneCycleLR(each, max_lr=0.1, total_steps=40) for each in (plain, ours)}
    assert cycles_momentum(schedulers[id(ours)])
    capturable.use_device_values()

    def between(optimizer: Optimizer, step: int) -> None:
        schedulers[id(optimizer)].step()
        optimizer.param_groups[0]["weight_decay"] = 0.1 / (1 + step)
        assert type(optimizer.param_groups[0]["lr"]) is float
        assert capturable.constants_changed() == ()

    train(plain, ours, capturable, 30, between)
    assert_equal(plain, ours, 1e-5)
    momentum = [group["betas"][0] if "betas" in group else group["momentum"] for group in ours.param_groups]
    assert momentum == [group["betas"][0] if "betas" in group else group["momentum"] for group in plain.param_groups]


def test_the_tier_can_change_in_the_middle_of_training() -> None:
    plain, ours, capturable = two(AdamW, amsgrad=True)
    train(plain, ours, capturable, 3)
    before = capturable.generation
    capturable.use_device_values()
    assert capturable.uses_device_values
    assert capturable.honours_found_inf
    assert capturable.generation != before
    train(plain, ours, capturable, 3)
    capturable.use_device_values(False)
    train(plain, ours, capturable, 3)
    assert_equal(plain, ours, 1e-5)


def test_dampening_needs_device_values() -> None:
    plain, ours, capturable = two(SGD, momentum=0.9, dampening=0.5)
    train(plain, ours, capturable, 5)
    assert capturable.uses_device_values
    assert_equal(plain, ours, 1e-6)


@pytest.mark.parametrize("device_values", [False, True])
@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"momentum": 0.9, "fused": True}])
def test_a_parameter_that_is_unfrozen_late_gets_its_buffer(device_values: bool, options: dict[str, Any]) -> None:
    plain, ours, capturable = two(SGD, **options)
    capturable.use_device_values(device_values)
    for optimizer in (plain, ours):
        optimizer.param_groups[0]["params"][0].requires_grad_(False)
    train(plain, ours, capturable, 2)
    entries = capturable.state_entries()
    for optimizer in (plain, ours):
        optimizer.param_groups[0]["params"][0].requires_grad_(True)
    if options.get("fused"):  # torch's own fused step can't mix new and old buffers
        plain.state[plain.param_groups[0]["params"][0]]["momentum_buffer"] = torch.zeros(4, 3)
    train(plain, ours, capturable, 3)
    assert capturable.state_entries() == entries + 1
    assert_equal(plain, ours, 1e-6 if device_values else 0.0)


def test_closure_hooks_and_a_schedulers_count_stay_torchs_own() -> None:
    _, ours, capturable = two(AdamW)
    scheduler = StepLR(ours, 1)  # warns, an error here, if it thinks that no step was taken
    capturable.use_device_values()
    seen: list[str] = []
    ours.register_step_pre_hook(lambda *_: seen.append("pre"))
    ours.register_step_post_hook(lambda *_: seen.append("post"))

    def closure() -> float:
        seen.append("closure" if torch.is_grad_enabled() else "closure without grad")
        set_gradients(ours, 0)
        return 0.75

    with capturable.prepared():
        assert ours.step(closure) == 0.75
    scheduler.step()
    assert seen == ["pre", "closure", "post"]


def test_found_inf_is_honoured_where_it_says_so() -> None:
    assert not CapturableOptimizer(RMSprop(parameters()), CPU).honours_found_inf
    assert not CapturableOptimizer(AdamW(parameters()), CPU).honours_found_inf
    for options in ({"fused": True}, {}):
        optimizer = SGD(parameters(), momentum=0.9, **options)
        capturable = CapturableOptimizer(optimizer, CPU)
        if not options:
            capturable.use_device_values()
        assert capturable.honours_found_inf
        set_gradients(optimizer, 0)
        optimizer.param_groups[0]["params"][0].grad[0, 0] = torch.nan
        optimizer.found_inf, optimizer.grad_scale = torch.tensor(1.0), torch.tensor(2.0)
        with capturable.prepared():
            optimizer.step()
        found = flat(optimizer)
        assert all(torch.equal(found[f"parameter {i}"], p) for i, p in enumerate(parameters()))
        assert all(not buffer.any() for name, buffer in found.items() if name.startswith("momentum_buffer"))


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: StepLR(optimizer, 2),
        lambda optimizer: ReduceLROnPlateau(optimizer, patience=1),
        lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=20, cycle_momentum=False),
        lambda optimizer: SequentialLR(optimizer, [ExponentialLR(optimizer, 0.9), StepLR(optimizer, 2)], [4]),
    ],
)
def test_schedulers_see_and_write_numbers(make: Callable[[Optimizer], LRScheduler]) -> None:
    plain, ours, capturable = two(Adam)
    schedulers = {id(each): make(each) for each in (plain, ours)}

    def between(optimizer: Optimizer, step: int) -> None:
        scheduler = schedulers[id(optimizer)]
        scheduler.step(*((1.0,) if isinstance(scheduler, ReduceLROnPlateau) else ()))
        assert all(type(group["lr"]) is float for group in optimizer.param_groups)

    train(plain, ours, capturable, 10, between)
    assert plain.param_groups[0]["lr"] != 0.01
    assert schedulers[id(ours)].get_last_lr() == schedulers[id(plain)].get_last_lr()
    assert_equal(plain, ours)


def test_which_schedulers_cycle_momentum() -> None:
    optimizer = SGD(parameters(), lr=0.1, momentum=0.9)
    cycling = OneCycleLR(optimizer, 0.1, total_steps=20)
    assert cycles_momentum(cycling)
    assert cycles_momentum(CyclicLR(optimizer, 0.01, 0.1))
    assert not cycles_momentum(CyclicLR(optimizer, 0.01, 0.1, cycle_momentum=False))
    assert not cycles_momentum(StepLR(optimizer, 3))
    assert not cycles_momentum(ReduceLROnPlateau(optimizer))
    assert cycles_momentum(ChainedScheduler([StepLR(optimizer, 3), cycling]))
    assert cycles_momentum(SequentialLR(optimizer, [ExponentialLR(optimizer, 0.9), cycling], [4]))


def test_numbers_that_are_baked_in_are_watched() -> None:
    _, ours, capturable = two(AdamW)
    OneCycleLR(ours, 0.1, total_steps=10, cycle_momentum=False)  # writes keys of its own
    capturable.accept()
    ours.param_groups[0]["lr"] = 0.7
    assert capturable.constants_changed() == ()
    ours.param_groups[1]["betas"] = (0.8, 0.999)
    assert capturable.constants_changed() == ("betas of parameter group 1 from (0.9, 0.999) to (0.8, 0.999)",)
    capturable.accept()
    assert capturable.constants_changed() == ()
    capturable.use_device_values()
    ours.param_groups[1]["betas"] = (0.7, 0.99)
    ours.param_groups[0]["eps"] = 1e-3
    assert capturable.constants_changed() == ()
    ours.param_groups[0]["weight_decay"] = 0.0
    ours.param_groups[0]["maximize"] = True
    assert capturable.constants_changed() == (
        "maximize of parameter group 0 from False to True",
        "weight_decay == 0 of parameter group 0 from False to True",
    )
    ours.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert capturable.constants_changed() == ("the number of parameter groups from 2 to 3",)


def test_what_was_captured_is_void_after_a_load_or_a_new_group() -> None:
    plain, ours, capturable = two(AdamW)
    train(plain, ours, capturable, 2)
    before = capturable.generation
    train(plain, ours, capturable, 2)
    assert capturable.generation == before
    saved = copy.deepcopy(ours.state_dict())
    saved["param_groups"][0]["lr"] = 0.125
    ours.load_state_dict(saved)
    after_load = capturable.generation
    assert after_load != before
    with capturable.prepared():
        assert ours.param_groups[0]["lr"].item() == 0.125
    ours.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": 0.5})
    assert capturable.generation != after_load
    with capturable.prepared():
        assert ours.param_groups[2]["lr"].item() == 0.5
    ours.param_groups[2]["params"].append(nn.Parameter(torch.zeros(2)))
    assert capturable.generation == after_load + 2


@pytest.mark.parametrize("device_values", [False, True])
@pytest.mark.parametrize("cls", [SGD, AdamW])
def test_checkpoints_go_to_a_plain_optimizer_and_back(
    cls: type[Optimizer], device_values: bool, tmp_path: Path
) -> None:
    plain, ours, capturable = two(cls, **({"momentum": 0.9} if cls is SGD else {}))
    capturable.use_device_values(device_values)
    tolerance = 1e-6 if device_values else 0.0
    train(plain, ours, capturable, 3)
    torch.save(ours.state_dict(), tmp_path / "ours.pt")
    torch.save(plain.state_dict(), tmp_path / "plain.pt")
    saved, wanted = (torch.load(tmp_path / f"{name}.pt") for name in ("ours", "plain"))
    assert saved["param_groups"] == wanted["param_groups"]
    assert {i: state.keys() for i, state in saved["state"].items()} == {
        i: state.keys() for i, state in wanted["state"].items()
    }
    # Each goes on from the other's checkpoint.
    plain.load_state_dict(saved)
    ours.load_state_dict(wanted)
    train(plain, ours, capturable, 3)
    assert_equal(plain, ours, tolerance)


def test_a_state_dict_within_a_step_is_plain_too() -> None:
    _, ours, capturable = two(AdamW)
    set_gradients(ours, 0)
    with capturable.prepared():
        ours.step()
        saved = ours.state_dict()
        assert isinstance(ours.param_groups[0]["lr"], Tensor)
    assert [group["lr"] for group in saved["param_groups"]] == [0.01, 0.003]
    assert all(type(group["lr"]) is float for group in saved["param_groups"])
    assert capturable.state_for_checkpoint(saved) == saved


def test_release_leaves_a_plain_optimizer() -> None:
    _, ours, capturable = two(AdamW)
    before = {key: value for key, value in vars(ours).items() if not key.startswith("_optimizer_")}
    train(two(AdamW)[0], ours, capturable, 1)
    capturable.release()
    assert {key: value for key, value in vars(ours).items() if not key.startswith("_optimizer_")} == before
    assert not ours._optimizer_state_dict_post_hooks
    assert not ours._optimizer_load_state_dict_post_hooks


def test_a_users_own_learning_rate_tensor_stays() -> None:
    lr = torch.tensor(0.5)
    optimizer = Adam(parameters(), lr=lr, foreach=False)
    capturable = CapturableOptimizer(optimizer, CPU)
    set_gradients(optimizer, 0)
    with capturable.prepared():
        assert optimizer.param_groups[0]["lr"] is lr
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] is lr
    with pytest.raises(OptimizationError, match="Adam's lr is a tensor on the device already; give a number"):
        capturable.use_device_values()


# Which can't be captured


class OfAGroup(Optimizer):
    """Plain gradient descent in the shape of a third party's; subclasses spoil it."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group, self.state[parameter])
        return loss

    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        buffer = state.setdefault("buffer", torch.zeros_like(parameter))
        buffer.mul_(group["momentum"]).add_(parameter.grad)
        parameter.sub_(buffer * group["lr"])


class DrawsNoise(OfAGroup):
    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        super().update(parameter, group, state)
        parameter.add_(torch.randn_like(parameter) * group["lr"])


class ReadsItsRate(OfAGroup):
    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        self.line = current_line() + 1
        parameter.add_(parameter.grad, alpha=-group["lr"])


class ReadsANorm(OfAGroup):
    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        norm = parameter.grad.norm()
        self.line = current_line() + 1
        if norm > 1e-6:
            super().update(parameter, group, state)


class CountsInPython(OfAGroup):
    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        super().update(parameter, group, state)


class CountsInItsGroup(OfAGroup):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        return super().step(closure)


class CountsItself(OfAGroup):
    rounds = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.rounds += 1
        return super().step(closure)


class ReplacesItsState(OfAGroup):
    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["mean"] = 0.9 * state.get("mean", 0.0) + 0.1 * parameter.grad
        parameter.sub_(state["mean"] * group["lr"])


class LooksForNonzeros(OfAGroup):
    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        self.line = current_line() + 1
        parameter[parameter > 0].sum()


class AsksForAClosure(OfAGroup):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return closure()


class NeedsAFloat(OfAGroup):
    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        raise TypeError(f"lr is a {type(group['lr']).__name__}")


def current_line() -> int:
    frame = currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def problem_of(cls: type[Optimizer]) -> tuple[str | None, Any]:
    optimizer: Any = cls(parameters())  # type: ignore[arg-type]
    scheduler = StepLR(optimizer, 1)  # patches optimizer.step
    set_gradients(optimizer, 0)
    optimizer.step()
    scheduler.step()
    before = copy.deepcopy((optimizer.state_dict(), [p.detach() for p in optimizer.param_groups[0]["params"]]))
    numbers, random = {k: v for k, v in vars(optimizer).items() if isinstance(v, int)}, torch.get_rng_state()
    capturable = CapturableOptimizer(optimizer, CPU)
    assert not capturable.is_known
    found = capturable.problem()
    # Nothing of the optimizer's own was changed.
    torch.testing.assert_close(
        (optimizer.state_dict(), [p.detach() for p in optimizer.param_groups[0]["params"]]), before, rtol=0, atol=0
    )
    assert {k: v for k, v in vars(optimizer).items() if isinstance(v, int)} == numbers
    assert torch.equal(torch.get_rng_state(), random)
    return found, optimizer


def test_an_unknown_optimizer_that_stays_on_the_device_is_accepted() -> None:
    assert problem_of(DrawsNoise)[0] is None
    found, optimizer = problem_of(OfAGroup)
    assert found is None
    plain = OfAGroup(parameters())
    set_gradients(plain, 0)
    plain.step()
    plain.param_groups[0]["lr"] *= 0.1
    train(plain, optimizer, CapturableOptimizer(optimizer, CPU), 3)
    assert_equal(plain, optimizer)


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (ReadsItsRate, "ReadsItsRate reads its learning rate on the host (test_graph_optimizer.py:{line})"),
        (
            ReadsANorm,
            "ReadsANorm reads a value computed from the gradients on the host (test_graph_optimizer.py:{line})",
        ),
        (
            LooksForNonzeros,
            "LooksForNonzeros has the host wait for the size of a result of index (test_graph_optimizer.py:{line})",
        ),
        (CountsInPython, "CountsInPython's state 'step' is a Python number that a replay would not advance"),
        (CountsInItsGroup, "CountsInItsGroup's param group's 'k' is a Python number that a replay would not advance"),
        (CountsItself, "CountsItself's attribute 'rounds' is a Python number that a replay would not advance"),
        (
            ReplacesItsState,
            "ReplacesItsState's state 'mean' is another tensor after each step, and a replay would go on from the "
            "first one",
        ),
    ],
)
def test_an_unknown_optimizer_is_refused_with_the_reason(cls: type[Optimizer], reason: str) -> None:
    found, optimizer = problem_of(cls)
    assert found == reason.format(line=getattr(optimizer, "line", None))


def test_other_optimizers_of_torch_are_judged_by_what_they_do() -> None:
    found, _ = problem_of(Adagrad)
    assert found is not None
    assert found.startswith("Adagrad reads its state 'step' on the host (adagrad.py:")
    assert "Adagrad reads its learning rate on the host (adagrad.py:" in found


def test_the_copies_are_freed_at_once() -> None:
    copies = []

    def prepare(twin: Optimizer) -> Any:
        copies.extend(weakref.ref(parameter) for parameter in twin.param_groups[0]["params"])
        return CapturableOptimizer(twin, CPU).prepared

    gc.disable()
    try:
        assert dry_step_problem(OfAGroup(parameters()), CPU, prepare) is None
        assert len(copies) == 3
        assert all(each() is None for each in copies)
    finally:
        gc.enable()


def test_an_optimizer_that_can_not_be_tried_is_refused() -> None:
    locked = OfAGroup(parameters())
    locked.lock = threading.Lock()
    held = CapturableOptimizer(locked, CPU).problem()
    assert held == (
        "OfAGroup holds what can't be copied to try its step on (TypeError: cannot pickle '_thread.lock' object)"
    )
    lbfgs = CapturableOptimizer(torch.optim.LBFGS(parameters()), CPU).problem()
    asks = CapturableOptimizer(AsksForAClosure(parameters()), CPU).problem()
    end = "evaluates the loss itself, as often as it wants to, in a closure that it asks for"
    assert lbfgs == f"LBFGS {end}"
    assert asks == f"AsksForAClosure {end}"
    needs = CapturableOptimizer(NeedsAFloat(parameters()), CPU).problem()
    assert needs == "NeedsAFloat's step fails with its learning rate on the device (TypeError: lr is a Tensor)"


def test_subclasses_are_known_by_the_step_that_they_take() -> None:
    class Renamed(AdamW):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)

    class Rewritten(AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    assert known_class(Renamed(parameters())) is AdamW
    assert known_class(Rewritten(parameters())) is None
    # The dry run sees through: on the CPU, AdamW's plain flags read on the host.
    found = CapturableOptimizer(Rewritten(parameters()), CPU).problem()
    assert found is not None
    assert "reads its learning rate on the host (adam.py:" in found


def test_known_optimizers_are_refused_with_the_reason() -> None:
    def problem(optimizer: Optimizer, device: torch.device = CPU) -> str | None:
        return CapturableOptimizer(optimizer, device).problem()

    (first, *_) = parameters()
    assert problem(Adam([first], differentiable=True, lr=0.1)) == (
        "Adam is differentiable=True, which keeps its step in autograd's graph"
    )
    tensors = (torch.tensor(0.9), torch.tensor(0.99))
    assert problem(Adam([first], betas=tensors, foreach=False)) == (
        "Adam's betas is a tensor, which its step reads on the host; give a number"
    )
    assert problem(RMSprop([nn.Parameter(torch.zeros(2, device="meta"))])) == (
        "parameter 0 of RMSprop's group 0 is on meta, and the step runs on cpu"
    )
    numbers = [nn.Parameter(torch.zeros(2, dtype=torch.complex64))]
    assert problem(SGD(numbers)) == (
        "parameter 0 of SGD's group 0 is complex, and its update on the device takes real numbers only"
    )
    assert problem(Adam(numbers)) is None
    assert problem(RMSprop(numbers)) is None
    first.grad = torch.sparse_coo_tensor([[0], [1]], [1.0], (4, 3), check_invariants=True)
    assert problem(SGD([first])) == "parameter 0 of SGD's group 0 has a sparse gradient, of another size at each step"
    assert problem(SGD(numbers, momentum=0.9, dampening=0.1)) is not None


def test_other_optimizers_have_no_device_values() -> None:
    capturable = CapturableOptimizer(RMSprop(parameters()), CPU)
    with pytest.raises(OptimizationError) as error:
        capturable.use_device_values()
    assert str(error.value) == (
        "cuda_graph_step: RMSprop takes nothing but lr from the device; SGD, Adam and AdamW take all their numbers, or "
        "capture without the optimizer (scope: fwd_bwd)."
    )
