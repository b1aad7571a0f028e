"""Columns of one product, and gradients that need no copy."""

import pytest
import torch
from torch import nn

from fasttrain.callbacks.joined_linear import JoinedLinear
from fasttrain.callbacks.joined_linear.columns import side_by_side, split_columns


def test_a_joined_linear_is_its_layers() -> None:
    layers = [nn.Linear(6, out).double() for out in (4, 4, 2)]
    x = torch.randn(5, 3, 6, dtype=torch.float64, requires_grad=True)
    parameters = [x, *(p for layer in layers for p in layer.parameters())]
    found, wanted = JoinedLinear("a", "b", "c")(x, *layers), tuple(layer(x) for layer in layers)
    upstream = [torch.randn_like(part) for part in wanted]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    gradients = torch.autograd.grad(found, parameters, upstream, retain_graph=True)
    for a, b in zip(gradients, torch.autograd.grad(wanted, parameters, upstream), strict=True):
        torch.testing.assert_close(a, b)
    (alone,) = torch.autograd.grad(found[1], x, upstream[1])  # the others' gradients are 0, and no views of one
    torch.testing.assert_close(alone, upstream[1] @ layers[1].weight)


def test_gradients_that_lie_side_by_side_are_not_copied() -> None:
    x = torch.randn(5, 9, requires_grad=True)
    whole = torch.randn(5, 9)
    (found,) = torch.autograd.grad(split_columns(x, [4, 3, 2]), x, whole.split([4, 3, 2], dim=-1))
    assert found.data_ptr() == whole.data_ptr()
    assert torch.equal(found, whole)


@pytest.mark.parametrize(
    "parts",
    [
        [torch.ones(5, 4), torch.ones(5, 3)],
        list(reversed(torch.ones(5, 6).split(3, dim=-1))),
        [torch.ones(5, 9)[:, :3], torch.ones(5, 9)[:, 3:6]],
        list(torch.ones(5, 9).split(3, dim=-1))[:2],
        [torch.ones(5, 1).expand(5, 3), torch.ones(5, 3)],
    ],
    ids=["apart", "reversed", "two matrices", "a column is missing", "expanded"],
)
def test_others_are(parts: list[torch.Tensor]) -> None:
    assert side_by_side(parts) is None


def test_second_derivatives_go_through() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        first, second = split_columns(x, [1, 3])
        return (first.exp() * second).sum()

    assert torch.autograd.gradgradcheck(function, (x,))
