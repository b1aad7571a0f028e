"""Peers take part in a bench where their trials pass, and trials tell right numbers from wrong ones."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import sigmoid_focal_loss

from fasttrain.callbacks.focal_loss import bench_apex as focal
from fasttrain.callbacks.gemm_gelu import bench_apex as gelu
from fasttrain.callbacks.gemm_relu import bench_apex as relu
from fasttrain.peers import assert_right, runs_beside
from fasttrain.proving import Trial


def focal_loss(
    logits: Tensor, targets: Tensor, foreground: Tensor, classes: int, alpha: float, gamma: float, smoothing: float
) -> Tensor:
    one_hot = F.one_hot(targets.clamp(min=0), classes) * (targets >= 0).unsqueeze(2)
    loss = sigmoid_focal_loss(logits.float(), one_hot.float(), alpha, gamma).sum(2)
    return (loss * (targets != -2)).sum() / foreground


class DenseGeluDense:
    @staticmethod
    def apply(x: Tensor, weight: Tensor, bias: Tensor, weight_2: Tensor, bias_2: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, weight, bias), approximate="tanh"), weight_2, bias_2)


def mlp_function(bias: int, activation: int, x: Tensor, *parameters: Tensor) -> Tensor:
    count = len(parameters) // 2
    for weight, bias_of_layer in zip(parameters[:count], parameters[count:], strict=True):
        x = F.linear(x, weight, bias_of_layer).relu()
    return x


def twice(function: Any) -> Any:
    """Of what the operator gives; of a class, what its `apply` gives."""
    if isinstance(function, type):
        return type("Twice", (), {"apply": staticmethod(lambda *args: 2 * function.apply(*args))})
    return lambda *args: 2 * function(*args)


OPERATORS: dict[str, tuple[Callable[[], None], str, str, Any]] = {
    "focal_loss": (focal.trial, "apex.contrib.focal_loss.focal_loss", "focal_loss", focal_loss),
    "FusedDenseGeluDense": (gelu.trial, "apex.fused_dense.fused_dense", "FusedDenseGeluDenseFunc", DenseGeluDense),
    "MLP": (relu.trial, "apex.mlp.mlp", "mlp_function", mlp_function),
}


def install(monkeypatch: pytest.MonkeyPatch, path: str, name: str, operator: Any) -> None:
    for depth in range(1, path.count(".") + 2):
        package = ".".join(path.split(".")[:depth])
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    setattr(sys.modules[path], name, operator)


@pytest.mark.parametrize("peer", OPERATORS)
def test_a_trial_passes_what_is_right_and_no_more(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trial, path, name, operator = OPERATORS[peer]
    install(monkeypatch, path, name, operator)
    trial()
    install(monkeypatch, path, name, twice(operator))
    with pytest.raises(AssertionError, match="of its largest magnitude"):
        trial()


def test_the_bench_names_apexs_one_form_of_gelu() -> None:
    nothing = (torch.zeros(1, 1),) * 5
    with pytest.raises(ValueError, match="tanh form alone, and approximate is 'none'"):
        gelu.linear_gelu_linear(*nothing, approximate="none")


@pytest.mark.parametrize("found", [1.1, float("nan"), float("inf")])
def test_what_is_off_or_not_finite_is_named(found: float) -> None:
    with pytest.raises(AssertionError, match="the sum is off by"):
        assert_right(lambda: [torch.tensor([found])], {"the sum": torch.tensor([1.0], dtype=torch.float64)}, 1e-2)


def test_a_peer_that_is_not_there_is_told_of() -> None:
    trial = Trial("Nobody's operator", "package_of_nobody", "package_of_nobody:trial")
    with pytest.warns(UserWarning, match="no row of a peer: Nobody's operator is not there"):
        assert not runs_beside(trial)
