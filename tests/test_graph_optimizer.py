"""Which optimizers' steps can be captured, and the reason that is told where one can't."""

import copy
import gc
import threading
import weakref
from inspect import currentframe
from typing import Any

import pytest
import torch
from optimizer_pairs import CPU, assert_equal, parameters, set_gradients, train
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import (
    StepLR,
)

from fasttrain.callbacks.cuda_graph_step.optimizer.capturable import CapturableOptimizer
from fasttrain.callbacks.cuda_graph_step.optimizer.dry_step import dry_step_problem
from fasttrain.callbacks.cuda_graph_step.optimizer.recipes import known_class
from fasttrain.errors import OptimizationError


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
