"""The body: what goes back through a ReLU and a bias, as one pass over memory. Works in any loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from fasttrain.callbacks.relu_bias_backward import in_torch
from fasttrain.environment import triton_runs
from fasttrain.errors import OptimizationError, nearest

if TYPE_CHECKING:
    from jaxtyping import Float

Tier = Literal["auto", "triton", "torch"]


def relu_bias_backward(
    g: Float[Tensor, "M C"], y: Float[Tensor, "M C"], tier: Tier = "auto"
) -> tuple[Float[Tensor, "M C"], Float[Tensor, " C"]]:
    """Return the gradients of what went into y = relu(x + bias): of x, and of the bias.

    Neither is part of a graph of autograd: this is for use in the backward of a torch.autograd.Function. The columns
    are summed in a fixed order, in float32; sums are bitwise the same in every run on one kind of GPU.

    Args:
        g: gradient of y. Contiguous, or it is copied first. A channels_last feature map is a matrix of this kind, see
            `as_rows`.
        y: output of the ReLU. Where it is 0 or less, no gradient passes; where it is NaN, it does.
        tier: "auto" takes the Triton kernels on NVIDIA GPUs, and PyTorch's operators elsewhere, for float64 and under
            torch.compile. "triton" is for the interpreter.

    Returns:
        g where y is positive, in g's dtype, and the sums of its columns, in float32 (float64 for float64).

    Raises:
        OptimizationError: g and y don't have the same shape (M, C), device, or a dtype that there is a kernel for.
    """
    masked, sums = _backward(g, y, tier)
    assert masked is not None
    return masked, sums


def column_sums(g: Float[Tensor, "M C"], tier: Tier = "auto") -> Float[Tensor, " C"]:
    """Return the sums of g's columns, as of `relu_bias_backward`: the gradient of a bias that no ReLU follows."""
    return _backward(g, None, tier)[1]


def as_rows(x: Float[Tensor, "N C H W"]) -> Float[Tensor, "M C"]:
    """Return a feature map as a matrix of its pixels by its channels: a view if it is channels_last, else a copy."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def _backward(g: Tensor, y: Tensor | None, tier: Tier) -> tuple[Tensor | None, Tensor]:
    if torch.compiler.is_compiling():
        return in_torch.relu_bias_backward(g, y)
    _check(g, y)
    if tier not in get_args(Tier):
        raise OptimizationError(f"relu_bias_backward: there is no tier '{tier}'; {nearest(tier, get_args(Tier))}")
    if tier == "torch" or (tier == "auto" and not _has_kernel(g, y)):
        return in_torch.relu_bias_backward(g, y)
    from fasttrain.callbacks.relu_bias_backward import in_triton  # where Triton isn't installed it can't be imported

    for matrix in (g, y):
        if matrix is not None and matrix.dtype not in in_triton.DTYPES:
            raise OptimizationError(
                f"relu_bias_backward: tier='triton' takes float16, bfloat16 and float32, and this is {matrix.dtype}; "
                "tier='auto' takes PyTorch instead."
            )
    return in_triton.relu_bias_backward(g.contiguous(), None if y is None else y.contiguous())


def _has_kernel(g: Tensor, y: Tensor | None) -> bool:
    matrices = (g,) if y is None else (g, y)
    kernels = torch.float16, torch.bfloat16, torch.float32
    return g.device.type == "cuda" and triton_runs() and all(m.dtype in kernels for m in matrices)


def _check(g: Tensor, y: Tensor | None) -> None:
    if g.dim() != 2 or not g.is_floating_point():
        raise OptimizationError(
            f"relu_bias_backward: a gradient is floating point of shape (M, C); this one is {g.dtype} of "
            f"{tuple(g.shape)}."
        )
    if y is not None and (y.shape != g.shape or y.device != g.device or not y.is_floating_point()):
        raise OptimizationError(
            f"relu_bias_backward: the ReLU's output is floating point, with the shape and device of its gradient, "
            f"{tuple(g.shape)} on {g.device}; this is {y.dtype} of {tuple(y.shape)} on {y.device}."
        )
