"""Snapshots of the host's state: random generators that were drawn from, and attributes that changed."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from examined_modules import Frozen

from fasttrain.callbacks.cuda_graph_step.host_state import (
    changed,
    host_random_state,
    plain_attributes,
    random_changed,
    tensor_attributes,
)


def test_random_generators_that_were_drawn_from() -> None:
    before = host_random_state()
    assert random_changed(before) == []
    random.random()
    assert random_changed(before) == ["python"]
    np.random.rand()
    torch.rand(1)
    assert random_changed(before) == ["python", "numpy", "torch"]
    assert random_changed(host_random_state()) == []


def test_attributes_by_path() -> None:
    module = Frozen()
    plain = plain_attributes(module)
    assert {path: plain[path] for path in ("count", "rate", "phase", "cache")} == {
        "count": 0, "rate": 0.5, "phase": "start", "cache": None,
    }  # fmt: skip
    assert str(plain["losses"]) == "a list of 0"
    assert plain["net.3.p"] == 0.1
    assert "training" not in plain
    assert "net.3.training" not in plain
    assert not any(path.startswith(("_", "accuracy._")) for path in plain), "the libraries' own"
    tensors = tensor_attributes(module)
    assert {"average", "last", "in_place", "net.1.running_mean", "accuracy.tp"} <= set(tensors)
    assert "net.0.weight" not in tensors
    assert tensors["last"] is module.last


def test_changes_between_snapshots() -> None:
    one = torch.zeros(())
    before = {
        "same": 1,
        "type": 1,
        "value": 1,
        "nan": float("nan"),
        "gone": 1,
        "tensor": one,
        "kept": one,
        "none": None,
    }
    after = {"same": 1, "type": True, "value": 2, "nan": float("nan"), "tensor": one.clone(), "kept": one, "new": 0}
    assert changed(before, after) == ["type", "value", "gone", "tensor", "none", "new"]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.losses.append(1),
        lambda m: m.table.update(a=2),
        lambda m: m.table.update(b=1),
        lambda m: m.table.__setitem__("t", torch.zeros(1)),
    ],
)
def test_containers_are_compared_by_what_they_hold(change: Callable[[Any], Any]) -> None:
    module: Any = Frozen()
    module.table = {"a": 1, "t": torch.zeros(1)}
    before = plain_attributes(module)
    assert changed(before, plain_attributes(module)) == []
    old = module.table["t"]
    change(module)
    assert len(changed(before, plain_attributes(module))) == 1, old
