"""What the tests of the loss scaler train: optimizers of all kinds, steps that overflow, and a network by hand."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam, AdamW, Optimizer

INF, NAN = float("inf"), float("nan")
OVERFLOWS = {0: INF, 1: NAN, 7: INF, 8: -INF, 30: NAN, 45: INF}
LATER = {step: factor for step, factor in OVERFLOWS.items() if step > 1}
Make = Callable[[list[nn.Parameter]], Optimizer]


class StepsOnHost(SGD):
    """Counts its steps as older optimizers do, in Python numbers of its state and its groups, and decays by them."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                state["mean"] = (state["mean"] if "mean" in state else torch.zeros_like(p)) + p.grad / group["k"]
                p.data.sub_(group["lr"] / state["step"] * state["mean"])


class LowersItsRate(SGD):
    """Keeps a number on the device in its groups, and changes it in every step."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            group["lr"].mul_(0.9)


class KeepsAList(SGD):
    """Keeps tensors where the scaler makes no copies of them."""

    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            history = self.state[p].setdefault("history", [])
            history.append(p.grad.clone())
            p.data.sub_(0.01 * history[-1])


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "dampening": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.5, foreach=False),
    "nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "tensor_lr": lambda p: SGD(p, lr=torch.tensor(0.1), momentum=0.9),
    "adam": lambda p: Adam(p, lr=0.01),
    "adamw": lambda p: AdamW(p, lr=0.01, amsgrad=True, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "lowers_its_rate": lambda p: LowersItsRate(p, lr=torch.tensor(0.1)),
    "steps_on_host": lambda p: StepsOnHost(p, lr=0.01),
    "keeps_a_list": lambda p: KeepsAList(p, lr=0.01),
}
FUSED: dict[str, Make] = {
    "fused_sgd": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "fused_adamw": lambda p: AdamW(p, lr=0.01, fused=True),
}


class Run:
    """A small network with a frozen and an unused parameter, trained by hand with a loss scaler."""

    def __init__(self, make: Make, scaler: GradScaler) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.net.unused = nn.Parameter(torch.ones(2))
        self.net[0].bias.requires_grad_(False)
        self.optimizer = make(list(self.net.parameters()))
        self.scaler = scaler
        self.inputs, self.factor = torch.randn(4, 5), torch.ones(())

    def backward(self) -> None:
        loss = self.net(self.inputs).pow(2).mean() * self.factor
        self.scaler.scale(loss).backward()

    def finish(self, clip: Callable[[], Any] | None = None) -> None:
        if clip is not None:
            self.scaler.unscale_(self.optimizer)
            clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def step(self, factor: float = 1.0, clip: Callable[[], Any] | None = None) -> None:
        self.factor.fill_(factor)
        self.optimizer.zero_grad()
        self.backward()
        self.finish(clip)

    def held(self) -> dict[str, Any]:
        """Everything that must be equal, tensors as bytes."""
        params = {name: bits(p) for name, p in self.net.named_parameters()}
        state = {
            (name, key): value
            for name, p in self.net.named_parameters()
            for key, value in self.optimizer.state.get(p, {}).items()
        }
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        return {"params": params, "state": frozen(state), "groups": frozen(groups), "scaler": self.scaler.state_dict()}


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()


def frozen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return bits(value)
    if isinstance(value, dict):
        return {key: frozen(each) for key, each in value.items()}
    return [frozen(each) for each in value] if isinstance(value, list) else value


def scaler_of(kind: type[GradScaler], **options: Any) -> GradScaler:
    return kind("cpu", **{"growth_interval": 5, **options})
