"""The fused kernels for autograd: what they keep for the backward is one bit for each element.

Bytes of memory traffic by element, forward and backward together, with 16-bit activations, by what is kept:

    one bit       4.125 + 4.125    written and read once
    one byte      5 + 5
    y itself      4 + 6            costs no memory where the next convolution keeps y for its weight gradient

So y, the free one, is also the slow one, and a byte is no faster than y. A bit takes 1/16 of y's memory.
"""

from typing import Any

import torch
from torch import Tensor

from fasttrain.callbacks.folded_norm import ScaleBias
from fasttrain.callbacks.frozen_bn import in_triton
from fasttrain.errors import OptimizationError


class ScaleBiasReLU(torch.autograd.Function):
    """relu(x * scale + bias [+ z | + z * z_scale + z_bias]); arguments of `apply` as of `in_triton.forward`.

    Returns y twice if `twice`, in the same memory, so that the two gradients of a tensor that is used twice are added
    up by the backward kernel, and not by a pass of their own.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, z: Tensor | None, scale: Tensor, bias: Tensor, z_scale: Tensor | None,
        z_bias: Tensor | None, twice: bool,
    ) -> Any:  # fmt: skip
        """Return y, or y and y; keep the mask."""
        z_folded = None if z_scale is None or z_bias is None else ScaleBias(z_scale, z_bias)
        y, mask = in_triton.forward(x, ScaleBias(scale, bias), z, z_folded, keep_mask=True)
        ctx.save_for_backward(mask, scale, z_scale)
        ctx.set_materialize_grads(False)
        ctx.channels_last = y.is_contiguous(memory_format=torch.channels_last)
        ctx.dtypes = x.dtype, None if z is None else z.dtype
        return (y, y.detach()) if twice else y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """Return dx and dz."""
        if torch.is_grad_enabled():
            raise OptimizationError(
                "frozen_bn: a gradient that can be differentiated again was asked for (create_graph=True), and the "
                "fused backward can't be; undo the fusion, or compute by fasttrain.callbacks.frozen_bn.reference."
            )
        mask, scale, z_scale = ctx.saved_tensors
        memory_format = torch.channels_last if ctx.channels_last else torch.contiguous_format
        dy, *rest = [g.contiguous(memory_format=memory_format) for g in gradients if g is not None] or [None]
        if dy is None:
            return (None,) * 7
        dx_dtype, dz_dtype = (ctx.dtypes[i] if ctx.needs_input_grad[i] else None for i in range(2))
        dx, dz = in_triton.backward(dy, rest[0] if rest else None, mask, scale, z_scale, dx_dtype, dz_dtype)
        return dx, dz, None, None, None, None, None
