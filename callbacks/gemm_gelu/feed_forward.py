"""The body: Linear, GELU, Linear as one function, and as a module. Works in any loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from fasttrain.callbacks.gemm_gelu.form import Approximate, form_for
from fasttrain.callbacks.gemm_gelu.reference import reference
from fasttrain.callbacks.gemm_gelu.ways import Ways
from fasttrain.environment import triton_runs
from fasttrain.errors import OptimizationError, nearest

if TYPE_CHECKING:
    from jaxtyping import Float

Tier = Literal["auto", "triton", "torch"]
# A tensor descriptor's rows begin at multiples of 16 bytes; rows that don't would be loaded element by element.
WIDTHS_MULTIPLE_OF = 8
OLDEST_CAPABILITY = (8, 0)
WAYS = Ways()


def linear_gelu_linear(
    x: Float[Tensor, "*tokens I"],
    weight: Float[Tensor, "H I"],
    bias: Float[Tensor, " H"] | None,
    weight_2: Float[Tensor, "O H"],
    bias_2: Float[Tensor, " O"] | None,
    approximate: Approximate = "none",
    tier: Tier = "auto",
    *,
    ways: Ways = WAYS,
) -> Float[Tensor, "*tokens O"]:
    """Return gelu(x @ weight.T + bias) @ weight_2.T + bias_2, in x's dtype, or autocast's where that is on.

    Args:
        x: tokens by features, in any number of dimensions; copied if not contiguous.
        weight: of the first linear layer, as nn.Linear keeps it.
        bias: likewise, or None.
        weight_2: of the second.
        bias_2: likewise, or None.
        approximate: "none" for GELU's erf form, "tanh" for the other, as torch names them.
        tier: "auto" takes the fused products for float16 and bfloat16 on NVIDIA GPUs from compute capability 8.0 on,
            where all widths are multiples of 8, and PyTorch's operators elsewhere and under torch.compile. "triton" is
            for the interpreter, and for other widths.
        ways: of the fused block, for measuring.

    Raises:
        OptimizationError: shapes, devices or dtypes don't fit; no such form or tier; tier="triton" for a dtype that it
            has no kernel for; in the backward of the fused products, if it is to be differentiated again.
    """
    if not torch.compiler.is_compiling():
        _check(x, weight, bias, weight_2, bias_2, tier)
        form_for(approximate, x.dtype)
    given = (x, weight, bias, weight_2, bias_2)
    # Outside of the function, so that autograd casts the gradients back. When compiling too: casts that autocast makes
    # are not in the graph by which AOTAutograd's cache knows a block, so that PyTorch 2.11, which also has no dtype of
    # autocast's in the key (pytorch/pytorch#181564), takes one compiled for float16 where it is bfloat16.
    x, weight, bias, weight_2, bias_2 = (_as_autocast(tensor) for tensor in given)  # type: ignore[assignment]
    assert x is not None
    assert weight is not None
    assert weight_2 is not None
    if torch.compiler.is_compiling() or not _takes_triton(tier, x, weight, bias, weight_2, bias_2):
        return reference(x, weight, bias, weight_2, bias_2, approximate)
    from fasttrain.callbacks.gemm_gelu.eager import LinearGeluLinear  # without Triton it can't be imported

    tokens = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    y: Tensor = LinearGeluLinear.apply(tokens, weight, bias, weight_2, bias_2, approximate, ways)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[1])


def _as_autocast(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or not torch.is_autocast_enabled(tensor.device.type) or not tensor.is_floating_point():
        return tensor
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.get_autocast_dtype(tensor.device.type))


def _takes_triton(tier: Tier, x: Tensor, *parameters: Tensor | None) -> bool:
    tensors = [x, *(p for p in parameters if p is not None)]
    same_dtype = all(tensor.dtype == x.dtype for tensor in tensors)
    if tier == "torch" or (tier == "auto" and not _has_fast_kernel(tensors)):
        return False
    from fasttrain.callbacks.gemm_gelu import in_triton

    if same_dtype and x.dtype in in_triton.DTYPES:
        return True
    if tier == "auto":
        return False
    found = ", ".join(sorted({str(tensor.dtype) for tensor in tensors}))
    known = ", ".join(map(str, in_triton.DTYPES))
    raise OptimizationError(
        f"gemm_gelu: tier='triton' takes tensors of one dtype, {known}; these are {found}. tier='auto' takes PyTorch "
        "instead, and under autocast they are cast."
    )


def _has_fast_kernel(tensors: list[Tensor]) -> bool:
    device = tensors[0].device
    widths = {size for tensor in tensors[1:] for size in tensor.shape}
    return (
        device.type == "cuda"
        and triton_runs()
        and torch.cuda.get_device_capability(device) >= OLDEST_CAPABILITY
        and all(width % WIDTHS_MULTIPLE_OF == 0 for width in widths)
    )


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, weight_2: Tensor, bias_2: Tensor | None, tier: str
) -> None:  # fmt: skip
    if tier not in get_args(Tier):
        raise OptimizationError(f"gemm_gelu: there is no tier '{tier}'; {nearest(tier, get_args(Tier))}")
    parameters = [("weight", weight), ("bias", bias), ("weight_2", weight_2), ("bias_2", bias_2)]
    tensors = [("x", x), *((name, tensor) for name, tensor in parameters if tensor is not None)]
    found = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors)
    fits = (
        x.dim() >= 1
        and weight.dim() == weight_2.dim() == 2
        and x.shape[-1] == weight.shape[1]
        and weight.shape[0] == weight_2.shape[1]
        and (bias is None or bias.shape == weight.shape[:1])
        and (bias_2 is None or bias_2.shape == weight_2.shape[:1])
    )
    if not fits or any(not tensor.is_floating_point() for _, tensor in tensors):
        raise OptimizationError(
            "gemm_gelu: floating-point tensors x (..., in), weight (hidden, in), bias (hidden,), weight_2 (out, "
            f"hidden) and bias_2 (out,) are taken; these are {found} of {x.dtype}."
        )
    if any(tensor.device != x.device for _, tensor in tensors):
        devices = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors)
        raise OptimizationError(f"gemm_gelu: all tensors are on one device; these are {devices}.")
