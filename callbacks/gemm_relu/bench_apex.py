"""Apex's MLP, to be timed beside ours, and the trial that shows whether it can be believed on a machine.

Apex: https://github.com/NVIDIA/apex, apex/mlp, built with `--cuda_ext`. A ReLU follows each of its layers, the last
included, so a network that ends without one keeps its last layer apart.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from fasttrain.callbacks.gemm_relu.reference import reference
from fasttrain.peers import assert_right
from fasttrain.proving import Trial

TRIAL = Trial("Apex's MLP", "apex", f"{__name__}:trial")
_WITH_BIAS = _RELU = 1


def linear_relu_chain(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], relu_last: bool) -> Tensor:
    """Return the output of the chain for x (M, K); casts as autocast does."""
    from apex.mlp.mlp import mlp_function  # type: ignore[import-not-found]

    last = len(weights) if relu_last else len(weights) - 1
    y: Tensor = mlp_function(_WITH_BIAS, _RELU, x, *weights[:last], *biases[:last])
    return y if relu_last else F.linear(y, weights[-1], biases[-1])


def trial() -> None:
    """Compare output and all gradients with the float64 reference, eagerly and in a replay.

    Inputs are small whole numbers and biases lie between two, so that no sum comes near 0, where the ReLU's gradient is
    a matter of rounding.

    Raises:
        AssertionError: a number is off.
    """
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    widths = (64, 256, 128)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, device=device).half()

    x = whole(512, widths[0]).requires_grad_()
    weights = [whole(outputs, inputs).requires_grad_() for inputs, outputs in pairwise(widths)]
    # Sums of the second layer lie half between whole numbers, as the outputs of the first do.
    biases = [(whole(outputs) + 2.0**-layer).requires_grad_() for layer, outputs in enumerate(widths[1:], start=1)]
    leaves = [x, *weights, *biases]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    count = len(weights)
    wanted = reference(exact[0], exact[1 : count + 1], exact[count + 1 :], True)
    dy = whole(*wanted.shape)
    right = [wanted.detach(), *torch.autograd.grad(wanted, exact, dy.double())]

    def compute() -> tuple[Tensor, ...]:
        output = linear_relu_chain(x, weights, biases, True)
        return output.detach(), *torch.autograd.grad(output, leaves, dy)

    names = [
        "output",
        "gradient of x",
        *(f"gradient of {kind} {i}" for kind in ("weight", "bias") for i in range(count)),
    ]
    assert_right(compute, dict(zip(names, right, strict=True)), 1e-2)
