"""The block for autograd. Of its six matrix products one or two are Triton's, with GELU in them; the others cuBLAS's.

What is kept for the backward is GELU's output, which the second layer's weight gradient needs, and either GELU's input
or its derivative: as many bytes. The derivative comes at the price of two instructions from the exponential that GELU
has computed, but only a product of Triton can write both from its registers; beside cuBLAS's product it would cost
another matrix to be written, and there the backward computes it again from the input, in its product's epilogue.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fasttrain.callbacks.gemm_gelu import in_triton
from fasttrain.callbacks.gemm_gelu.ways import Ways
from fasttrain.callbacks.relu_bias_backward import column_sums
from fasttrain.errors import OptimizationError


class LinearGeluLinear(torch.autograd.Function):
    """linear(gelu(linear(x))); arguments of `apply`, all of one dtype:

    x: (tokens, in). weight: (hidden, in). bias: (hidden,) or None. weight_2: (out, hidden). bias_2: (out,) or None.
    approximate: of GELU. ways: where GELU is computed.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, weight_2: Tensor, bias_2: Tensor | None,
        approximate: str, ways: Ways,
    ) -> Tensor:  # fmt: skip
        """Return (tokens, out)."""
        wants = ctx.needs_input_grad
        # With nothing to be kept, what goes into GELU need not be written either.
        by_pass = ways.gelu == "pass" and any(wants[:3])
        if by_pass:
            kept = F.linear(x, weight, bias)
            hidden = in_triton.gelu(kept, approximate)
        else:
            hidden, kept = in_triton.forward(x, weight, bias, approximate, keep_slope=any(wants[:3]))  # type: ignore[assignment]
        ctx.save_for_backward(
            x if wants[1] else None,
            weight if wants[0] else None,
            weight_2 if kept is not None else None,
            hidden if wants[3] else None,
            kept,
        )
        ctx.bias_dtypes = tuple(None if b is None else b.dtype for b in (bias, bias_2))
        ctx.approximate = approximate if by_pass else None
        return F.linear(hidden, weight_2, bias_2)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of the first five arguments that want one, in their dtypes."""
        if torch.is_grad_enabled():
            raise OptimizationError(
                "gemm_gelu: a gradient that can be differentiated again was asked for (create_graph=True), and the "
                "fused block has no second derivative; call it with tier='torch'."
            )
        x, weight, weight_2, hidden, kept = ctx.saved_tensors
        wants, (bias_dtype, bias_2_dtype) = ctx.needs_input_grad, ctx.bias_dtypes
        dy = gradients[0].contiguous()
        dx = d_weight = d_bias = d_weight_2 = d_bias_2 = None
        if wants[4]:
            d_bias_2 = column_sums(dy).to(bias_2_dtype)
        if wants[3]:
            d_weight_2 = dy.t() @ hidden
        if kept is not None:
            sums = bias_dtype if wants[2] else None
            d_before, d_bias = in_triton.backward(dy, weight_2, kept, ctx.approximate, sums)
            d_weight = d_before.t() @ x if wants[1] else None
            dx = d_before @ weight if wants[0] else None
        return dx, d_weight, d_bias, d_weight_2, d_bias_2, None, None
