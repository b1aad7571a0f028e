"""`CapturedFunction` on the CPU: in manual optimization, without Lightning, and where it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_fits import Small, adamw, assert_same_state, batches, fit, same_start
from torch import Tensor, nn

from fasttrain.callbacks import CapturedFunction
from fasttrain.callbacks.cuda_graph_step.reference import reference


class Manual(Small):
    """Optimizes by itself, through a captured function."""

    def __init__(self, warm_up: int) -> None:
        super().__init__(adamw)
        self.automatic_optimization = False
        self.warm_up = warm_up

    def on_train_start(self) -> None:
        self.function = CapturedFunction(
            self.one_step, optimizers=self.optimizers(), warm_up=self.warm_up, stand_in=True
        )

    def on_train_end(self) -> None:
        self.function.release()

    def one_step(self, x: Tensor, y: Tensor) -> Tensor:
        optimizer: Any = self.optimizers()
        loss = nn.functional.cross_entropy(self.net(x), y)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.function(*batch))


def test_a_captured_function_in_manual_optimization() -> None:
    ours, eager = same_start(lambda: Manual(3))
    eager.warm_up = 10**9
    trainers = [fit(module, batches(12, rows=(6, 6, 6, 4))) for module in (ours, eager)]
    assert ours.function.pool.hits == 18
    assert ours.function.pool.captures == 2
    assert [trainer.global_step for trainer in trainers] == [24, 24]
    assert_same_state(*trainers)


def test_a_captured_function_needs_no_lightning() -> None:
    torch.manual_seed(0)
    net = nn.Linear(8, 4)
    other = nn.Linear(8, 4)
    other.load_state_dict(net.state_dict())
    pairs = [(net, torch.optim.SGD(net.parameters(), 0.1)), (other, torch.optim.SGD(other.parameters(), 0.1))]

    def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
        def step(batch: dict[str, Tensor]) -> dict[str, Tensor]:
            loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return {"loss": loss.detach()}

        return step

    captured = CapturedFunction(step_of(*pairs[0]), optimizers=pairs[0][1], module=net, stand_in=True)
    for index, (x, y) in enumerate(batches(12).made):
        pairs[0][1].param_groups[0]["lr"] = pairs[1][1].param_groups[0]["lr"] = 0.1 / (1 + index)
        mine = captured({"x": x, "y": y})
        theirs = reference(lambda batch: nn.functional.cross_entropy(other(batch[0]), batch[1]), pairs[1][1], (x, y))
        assert torch.equal(mine["loss"], theirs)
    assert captured.pool.hits == 8
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    with pytest.raises(ValueError, match="give the device of the inputs"):
        CapturedFunction(net.forward)


class CountingSteps(torch.optim.Optimizer):
    """Counts its steps in Python, as optimizers outside of torch do; a graph would have the first count built in."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                parameter.sub_(parameter.grad / state["step"])


def test_a_captured_function_refuses_an_optimizer_that_a_replay_would_not_advance() -> None:
    torch.manual_seed(0)
    net, other = nn.Linear(8, 4), nn.Linear(8, 4)
    other.load_state_dict(net.state_dict())
    ours, plain = CountingSteps(net.parameters()), CountingSteps(other.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        return reference(lambda batch: nn.functional.cross_entropy(net(batch[0]), batch[1]), ours, (x, y))

    with pytest.warns(UserWarning, match="CapturedFunction: calls run eagerly, since CountingSteps's state 'step' is"):
        captured = CapturedFunction(step, optimizers=ours, module=net, stand_in=True)
    for x, y in batches(8).made:
        captured(x, y)
        reference(lambda batch: nn.functional.cross_entropy(other(batch[0]), batch[1]), plain, (x, y))
    assert captured.pool.hits == captured.pool.captures == 0
    assert torch.equal(net.weight, other.weight)
