"""Apex's FusedDenseGeluDense, to be timed beside ours, and the trial that shows whether it can be believed.

Apex: https://github.com/NVIDIA/apex, apex/fused_dense, built with `--cuda_ext`. GELU is cuBLASLt's epilogue, in its
tanh form.
"""

import torch
from torch import Tensor

from fasttrain.callbacks.gemm_gelu.form import Approximate
from fasttrain.callbacks.gemm_gelu.reference import reference
from fasttrain.peers import assert_right
from fasttrain.proving import Trial

TRIAL = Trial("Apex's FusedDenseGeluDense", "apex", f"{__name__}:trial")
FORM: Approximate = "tanh"
NAMES = (
    "output",
    "gradient of x",
    "gradient of weight",
    "gradient of bias",
    "gradient of weight_2",
    "gradient of bias_2",
)


def linear_gelu_linear(
    x: Tensor, weight: Tensor, bias: Tensor, weight_2: Tensor, bias_2: Tensor, approximate: Approximate = FORM
) -> Tensor:
    """Return linear(gelu(linear(x))) of x (M, K) by Apex.

    Raises:
        ValueError: GELU's other form is asked for.
    """
    if approximate != FORM:
        raise ValueError(f"Apex has GELU's {FORM} form alone, and approximate is '{approximate}'")
    from apex.fused_dense.fused_dense import FusedDenseGeluDenseFunc  # type: ignore[import-not-found]

    output: Tensor = FusedDenseGeluDenseFunc.apply(x, weight, bias, weight_2, bias_2)
    return output


def trial() -> None:
    """Compare output and all gradients with the float64 reference, eagerly and in a replay.

    Raises:
        AssertionError: a number is off.
    """
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = ((512, 256), (1024, 256), (1024,), (256, 1024), (256,))
    leaves = [(torch.randn(shape, device=device) / 16).half().requires_grad_() for shape in shapes]
    dy = torch.randn(512, 256, device=device).half()
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wanted = reference(exact[0], exact[1], exact[2], exact[3], exact[4], FORM)
    right = [wanted.detach(), *torch.autograd.grad(wanted, exact, dy.double())]

    def compute() -> tuple[Tensor, ...]:
        output = linear_gelu_linear(leaves[0], leaves[1], leaves[2], leaves[3], leaves[4])
        return output.detach(), *torch.autograd.grad(output, leaves, dy)

    assert_right(compute, dict(zip(NAMES, right, strict=True)), 2e-2)
