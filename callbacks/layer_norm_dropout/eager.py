"""The fused kernels for autograd, and what is kept from forward to backward.

Bytes of memory traffic by element, forward and backward together, with 16-bit activations, dropout and a residual, by
what is kept beside a mean, a standard deviation and a seed:

    normalized rows      8 + 8     as much memory as the sum that PyTorch keeps, and no mask
    x and residual       6 + 10    x is kept alive for it, and the residual if nobody else keeps it
    y                    6 + 8     what was normalized is (y - bias) / weight, which is lost where a weight is near zero

So y, the fastest, does not give the same numbers for all weights; between the others bytes don't decide. Without a
residual x is kept: 4 + 6, where normalized rows would be 6 + 6.
"""

from typing import Any

import torch
from torch import Tensor

from fasttrain.callbacks.layer_norm_dropout import in_triton
from fasttrain.callbacks.layer_norm_dropout.in_triton import Inputs, Kept, Wanted
from fasttrain.errors import OptimizationError


class DropoutAddLayerNormFunction(torch.autograd.Function):
    """y of (rows, H); arguments of `apply` as of `in_triton.forward`.

    Returns y twice if `twice`, in the same memory, so that the two gradients of a tensor that is used twice are added
    up by the backward kernel, and not by a pass of their own.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, x_bias: Tensor | None, weight: Tensor | None,
        bias: Tensor | None, seed: Tensor | None, p: float, eps: float, dtype: torch.dtype, twice: bool,
    ) -> Any:  # fmt: skip
        """Return y, or y and y."""
        inputs = Inputs(x, residual, x_bias, weight, seed)
        y, kept = in_triton.forward(inputs, bias, p, eps, dtype, keep=True)
        again = inputs if kept.normalized is None else Inputs(kept.normalized, None, None, weight, seed)
        ctx.save_for_backward(*again, *kept)
        ctx.set_materialize_grads(False)
        dtypes = [None if tensor is None else tensor.dtype for tensor in (x, residual, x_bias, weight, bias)]
        ctx.wanted = Wanted(*(dtypes[i] if ctx.needs_input_grad[i] else None for i in range(5)))
        ctx.p = p
        return (y, y.detach()) if twice else y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """Return the gradients of the first five arguments."""
        if torch.is_grad_enabled():
            raise OptimizationError(
                "layer_norm_dropout: a gradient that can be differentiated again was asked for (create_graph=True), "
                "and the fused backward can't be; undo the fusion, or call the function with tier='torch'."
            )
        saved = ctx.saved_tensors
        dy, *rest = [gradient.contiguous() for gradient in gradients if gradient is not None] or [None]
        if dy is None:
            return (None,) * 10
        inputs, kept = Inputs(*saved[:5]), Kept(*saved[5:])
        found = in_triton.backward(dy, rest[0] if rest else None, inputs, kept, ctx.p, ctx.wanted)
        return *found, None, None, None, None, None
