"""A torch optimizer prepared for capture, on the CPU: its numbers are a plain one's, with and without device values."""

import sys
from typing import Any

import pytest
import torch
from optimizer_pairs import CPU, assert_equal, flat, parameters, set_gradients, train, two
from torch.optim import ASGD, SGD, Adadelta, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from fasttrain.callbacks.cuda_graph_step.optimizer.capturable import CapturableOptimizer, cycles_momentum
from fasttrain.callbacks.cuda_graph_step.optimizer.dry_step import LEARNING_RATE, HostReads
from fasttrain.callbacks.cuda_graph_step.optimizer.recipes import RECIPES, recipe_for

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
