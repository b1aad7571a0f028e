"""The body: linear layers with ReLU between them as one function. Works in any loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fasttrain.callbacks.gemm_relu.reference import reference
from fasttrain.environment import triton_runs
from fasttrain.errors import OptimizationError, nearest

if TYPE_CHECKING:
    from jaxtyping import Float

    from fasttrain.callbacks.gemm_relu.layers import Ways

Tier = Literal["auto", "fused", "torch"]
_ALIGNMENT = 8  # 16-bit elements in 16 bytes


def linear_relu_chain(
    x: Float[Tensor, "*batch K"],
    weights: Sequence[Float[Tensor, "N M"]],
    biases: Sequence[Float[Tensor, " N"]],
    relu_last: bool = True,
    tier: Tier = "auto",
    ways: Ways | None = None,
) -> Float[Tensor, "*batch N"]:
    """Return relu(... relu(x W0' + b0) ... W' + b), in the dtype that a linear layer gives, under autocast too.

    Args:
        x: any number of rows; not contiguous, it is copied first.
        weights: (outputs, inputs) of each layer, as in nn.Linear.
        biases: (outputs,) of each layer.
        relu_last: whether a ReLU follows the last layer too.
        tier: "auto" takes the fused chain on NVIDIA GPUs with Triton, and PyTorch's operators elsewhere, for float64,
            for no rows at all, and under torch.compile, which fuses them by itself. "fused" is for tests off a GPU.
        ways: of the fused chain, for measuring; by default `Ways()`.

    Raises:
        OptimizationError: shapes or devices don't fit, or dtypes don't outside of autocast; in the backward of the
            fused chain, if it is to be differentiated again.
    """
    if torch.compiler.is_compiling():
        return reference(x, weights, biases, relu_last)
    dtype = _computed_in(x, weights)
    _check(x, weights, biases, dtype)
    if tier not in get_args(Tier):
        raise OptimizationError(f"gemm_relu: there is no tier '{tier}'; {nearest(tier, get_args(Tier))}")
    if tier == "torch" or x.numel() == 0 or (tier == "auto" and not _takes_fused(x, dtype)):
        return reference(x, weights, biases, relu_last)
    return _fused(x, weights, biases, relu_last, dtype, ways)


def _fused(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], relu_last: bool, dtype: torch.dtype,
    ways: Ways | None,
) -> Tensor:  # fmt: skip
    # Where Triton isn't installed these can't be imported.
    from fasttrain.callbacks.gemm_relu.chain import LinearReLUChain, forward
    from fasttrain.callbacks.gemm_relu.layers import Kind, Ways, kinds

    ways = ways or Ways()
    parameters = [parameter for pair in zip(weights, biases, strict=True) for parameter in pair]
    records = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *parameters))
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    of_layers = kinds(rows, weights, relu_last, dtype, ways, x_needs_gradient=records and x.requires_grad)
    if of_layers[0] is Kind.PRODUCT:
        rows = rows.to(dtype)
        missing = -rows.shape[1] % _ALIGNMENT
        if ways.pad and missing and dtype != torch.float32:
            rows, parameters[0] = F.pad(rows, (0, missing)), F.pad(parameters[0], (0, missing))
    with torch.autocast(x.device.type, enabled=False):
        if records:
            y = LinearReLUChain.apply(rows, relu_last, dtype, of_layers, ways, *parameters)
        else:
            y = forward(rows, parameters[0::2], parameters[1::2], relu_last, dtype, of_layers, ways)[0][-1]
    return y.view(*x.shape[:-1], y.shape[-1])  # type: ignore[no-any-return]


def _computed_in(x: Tensor, weights: Sequence[Tensor]) -> torch.dtype:
    dtype = weights[0].dtype if weights else x.dtype
    # Autocast leaves float64 as it is.
    if _autocasts(x) and torch.float64 not in (dtype, x.dtype):
        return torch.get_autocast_dtype(x.device.type)
    return dtype


def _autocasts(x: Tensor) -> bool:
    return torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type)


def _takes_fused(x: Tensor, dtype: torch.dtype) -> bool:
    return x.device.type == "cuda" and triton_runs() and dtype in (torch.float16, torch.bfloat16, torch.float32)


def _check(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], dtype: torch.dtype) -> None:
    if not weights or len(weights) != len(biases):
        raise OptimizationError(
            f"gemm_relu: a chain has one or more layers, each with a weight and a bias; these are {len(weights)} "
            f"weights and {len(biases)} biases."
        )
    inputs = x.shape[-1] if x.dim() else 0
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        if weight.dim() != 2 or weight.shape[1] != inputs or bias.shape != weight.shape[:1]:
            raise OptimizationError(
                f"gemm_relu: layer {i} has {inputs} inputs, so its weight is (N, {inputs}) and its bias (N,); these "
                f"are {tuple(weight.shape)} and {tuple(bias.shape)}."
            )
        if any(tensor.device != x.device for tensor in (weight, bias)):
            raise OptimizationError(
                f"gemm_relu: x is on {x.device}, and layer {i} on {weight.device}; move one to the other."
            )
        inputs = len(weight)
    _check_dtypes(x, weights, biases, dtype)


def _check_dtypes(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], dtype: torch.dtype) -> None:
    found = {tensor.dtype for tensor in (x, *weights, *biases)}
    if not all(one.is_floating_point for one in found):
        raise OptimizationError(f"gemm_relu: x and parameters are floating point; these are {_names(found)}.")
    if found != {dtype} and (torch.float64 in found or not _autocasts(x)):
        raise OptimizationError(
            f"gemm_relu: outside of autocast x and all parameters have one dtype; these are {_names(found)}. Cast "
            "them, or enable autocast, which leaves float64 alone."
        )


def _names(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype) for dtype in dtypes))
