"""Optimizers for the tests of capturing their step: a plain one beside one that was prepared, and their comparison."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fasttrain.callbacks.cuda_graph_step.optimizer.capturable import CapturableOptimizer

CPU = torch.device("cpu")


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
