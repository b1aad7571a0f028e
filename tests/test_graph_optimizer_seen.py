"""What others see of an optimizer prepared for capture: numbers in its groups, plain checkpoints, its schedulers."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from optimizer_pairs import CPU, assert_equal, parameters, set_gradients, train, two
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
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
from fasttrain.errors import OptimizationError


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
