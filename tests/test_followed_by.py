"""Which child of a module runs into which: what an nn.Sequential and a traced forward show."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from fasttrain.followed_by import followed_by


def pairs(parent: nn.Module) -> list[tuple[str, str]]:
    return list(followed_by(parent, lambda m: type(m) is nn.Linear, lambda m: type(m) is nn.ReLU))


def test_neighbours_in_a_sequence() -> None:
    linear, relu = nn.Linear(2, 2), nn.ReLU()
    sequence = nn.Sequential(linear, relu, nn.Linear(2, 2), nn.Tanh(), nn.ReLU(), linear, relu)
    assert pairs(sequence) == [("0", "1"), ("5", "6")]
    assert pairs(nn.Sequential(linear, nn.Linear(2, 2))) == []


class Parent(nn.Module):
    """Children whose names say nothing about the order in which they run."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.act, self.linear, self.absent, self.calls = kind, nn.ReLU(), nn.Linear(2, 2), None, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.linear(x)
        if self.kind == "used twice":
            return self.act(y) + y  # type: ignore[no-any-return]
        if self.kind == "act twice":
            return self.act(self.act(y) - 1)  # type: ignore[no-any-return]
        if self.kind == "called twice":
            return self.act(self.linear(y))  # type: ignore[no-any-return]
        if self.kind == "something between":
            return self.act(y + 1)  # type: ignore[no-any-return]
        if self.kind == "depends on values":
            return self.act(y) if x.sum() > 0 else y
        if self.kind == "random":
            torch.rand(1)
        return self.act(y)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "kind", ["plain", "random", "used twice", "act twice", "called twice", "something between", "depends on values"]
)
def test_a_traced_forward(kind: str) -> None:
    parent = Parent(kind)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    found = [("linear", "act")] if kind in ("plain", "random") else []
    assert pairs(parent) == found
    assert parent.calls == 0, "tracing leaves it as it was"
    assert torch.equal(torch.get_rng_state(), before)


def test_a_lightning_modules_children_are_run_by_more_than_its_forward() -> None:
    class Module(Parent, pl.LightningModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.linear(batch).sum()  # type: ignore[no-any-return]

    assert pairs(Module("plain")) == []
