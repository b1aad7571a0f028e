"""The body: dropout, residual addition and layer normalization as one pass. Works in any loop."""

from typing import Literal

import torch
from torch import Tensor

from fasttrain.callbacks.layer_norm_dropout import in_torch
from fasttrain.callbacks.layer_norm_dropout.mask import draw_seed, threshold
from fasttrain.environment import triton_runs
from fasttrain.errors import OptimizationError
from fasttrain.twin import twin_of, with_twin

Tier = Literal["auto", "triton", "torch"]
ROOM = "layer_norm_dropout"


def dropout_add_layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    p: float = 0.0,
    eps: float = 1e-5,
    x_bias: Tensor | None = None,
    seed: Tensor | None = None,
    tier: Tier = "auto",
    twice: bool = False,
) -> Tensor:
    """Return layer_norm(residual + dropout(x + x_bias)) over the last dimension, of size H.

    Computed in float32 and rounded once. The result has autocast's dtype under autocast, where F.layer_norm returns
    float32; elsewhere that of x, or what PyTorch gives the sum of x and the residual. Gradients have their tensors'
    dtypes, which may all be different.

    Args:
        x: (..., H), float16, bfloat16, float32, or float64 (in plain PyTorch). Copied if not contiguous.
        weight: (H,), likewise bias and x_bias; None for 1 or 0.
        bias: added to the result.
        residual: of x's shape; None for 0.
        p: share of elements that are dropped; 0 outside of training. The kernels round it to a multiple of 2^-16.
        eps: added to the variance.
        x_bias: added to x before dropout, the bias of the linear layer before for instance: its gradient is then a
            by-product.
        seed: int64 (1,) on x's device, which decides about the mask; see `mask.keep_mask`. By default it is drawn from
            PyTorch's generator for the device, anew for each call and each replay of a captured graph.
        tier: "auto" takes the Triton kernels on NVIDIA GPUs for H up to 8192, and PyTorch's operators elsewhere and
            under torch.compile, which fuses them by itself. "triton" is for the interpreter.
        twice: the result will be used twice, one of the two times through `twin`.

    Raises:
        OptimizationError: shapes or devices don't fit, or p is no share; Triton is asked for where it has no kernel;
            in the backward of the Triton tier, if it is to be differentiated again.
    """
    if torch.compiler.is_compiling():
        dtype = _result_dtype(x, residual)
        return in_torch.dropout_add_layer_norm(x, weight, bias, residual, x_bias, p, eps, seed, dtype)
    _check(x, weight, bias, residual, x_bias, p)
    dtype = _result_dtype(x, residual)
    tensors = [tensor for tensor in (x, residual, x_bias, weight, bias) if tensor is not None]
    if not _takes_triton(tier, tensors):
        return in_torch.dropout_add_layer_norm(x, weight, bias, residual, x_bias, p, eps, seed, dtype)
    from fasttrain.callbacks.layer_norm_dropout import in_triton  # where Triton isn't installed it can't be imported
    from fasttrain.callbacks.layer_norm_dropout.eager import DropoutAddLayerNormFunction

    rows, x_bias, weight, bias = _rows(x), _dense(x_bias), _dense(weight), _dense(bias)
    residual_rows = None if residual is None else _rows(residual)
    if threshold(p) == 0:
        seed = None
    elif seed is None:
        seed = draw_seed(x.device)
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        inputs = in_triton.Inputs(rows, residual_rows, x_bias, weight, seed)
        return in_triton.forward(inputs, bias, p, eps, dtype, keep=False)[0].view(x.shape)
    result = DropoutAddLayerNormFunction.apply(
        rows, residual_rows, x_bias, weight, bias, seed, p, eps, dtype, twice
    )  # fmt: skip
    if not twice:
        return result.view(x.shape)  # type: ignore[no-any-return]
    y, other = (each.view(x.shape) for each in result)
    return with_twin(y, other, ROOM)


def twin(y: Tensor) -> Tensor:
    """Return `y` for a second use of it: the same values, with a gradient of its own if it was made with `twice`.

    A tensor's two gradients are otherwise added by a pass over memory before the backward of the tensor begins.
    """
    return twin_of(y, ROOM)


def _result_dtype(x: Tensor, residual: Tensor | None) -> torch.dtype:
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) and dtype != torch.float64 else dtype


def _takes_triton(tier: Tier, tensors: list[Tensor]) -> bool:
    x = tensors[0]
    if tier == "torch" or (tier == "auto" and not (x.device.type == "cuda" and triton_runs())):
        return False
    from fasttrain.callbacks.layer_norm_dropout import in_triton  # where Triton isn't installed it can't be imported

    if in_triton.can_take(x.shape[-1], tensors):
        return True
    if tier == "auto":
        return False
    dtypes = ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))
    raise OptimizationError(
        f"layer_norm_dropout: tier='triton' has no kernel for rows of {x.shape[-1]} elements with {dtypes} on "
        f"{x.device.type}: it takes up to {in_triton.LARGEST_HIDDEN} in float16, bfloat16 and float32 on an NVIDIA "
        "GPU; tier='auto' takes PyTorch's operators instead."
    )


def _rows(x: Tensor) -> Tensor:
    return x.reshape(x.numel() // x.shape[-1], x.shape[-1]).contiguous()


def _dense(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()


def _check(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, x_bias: Tensor | None, p: float
) -> None:
    if x.dim() == 0 or x.shape[-1] == 0 or not x.is_floating_point():
        raise OptimizationError(
            f"layer_norm_dropout: the input is floating point of shape (..., hidden); this is {x.dtype} of {_shape(x)}."
        )
    if not 0 <= p <= 1:
        raise OptimizationError(f"layer_norm_dropout: p is the share that is dropped, from 0 to 1; it is {p}.")
    if residual is not None and (residual.shape != x.shape or residual.device != x.device):
        raise OptimizationError(
            f"layer_norm_dropout: the residual has the shape and device of x, {_shape(x)} on {x.device}; this is "
            f"{_shape(residual)} on {residual.device}."
        )
    for name, values in (("weight", weight), ("bias", bias), ("x_bias", x_bias)):
        if values is not None and (values.shape != x.shape[-1:] or values.device != x.device):
            raise OptimizationError(
                f"layer_norm_dropout: {name} has one value for each of the {x.shape[-1]} elements of a row, on "
                f"{x.device}; this has shape {_shape(values)} on {values.device}."
            )


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
