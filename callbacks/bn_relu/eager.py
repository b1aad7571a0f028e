"""The fused kernels for autograd: what they keep for the backward, and which passes it takes.

Bytes of memory traffic by element, forward + backward, with 16-bit activations, where the ReLU's mask comes from:

    BN + ReLU         computed again from x: 6 + 10         a bit: 6.1 + 10.3      y: 6 + 14
    BN + add + ReLU   a bit, and the masked gradient, which is dz, written by the first pass: 8.1 + 12.1
    BN + BN + add     a bit, read by both passes: 10.1 + 16.3
"""

from typing import Any

import torch
from torch import Tensor, nn

from fasttrain.callbacks.bn_relu import in_triton
from fasttrain.errors import OptimizationError


class BatchNormReLU(torch.autograd.Function):
    """relu(norm(x) [+ z | + z_norm(z)]) with the statistics of the batch.

    The affine parameters are arguments beside their norms, because autograd sees arguments alone. Returns y twice if
    `twice`, in the same memory, so that the two gradients of a tensor that is used twice are added up by the backward
    kernel, and not by a pass of their own.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, z: Tensor | None, weight: Tensor | None, bias: Tensor | None, z_weight: Tensor | None,
        z_bias: Tensor | None, norm: nn.BatchNorm2d, z_norm: nn.BatchNorm2d | None, twice: bool,
    ) -> Any:  # fmt: skip
        """Return y, or y and y; keep x, the statistics, and with a z the mask."""
        y, mask, stats, z_stats = forward(x, norm, z, z_norm, keep_mask=z is not None)
        ctx.save_for_backward(x, stats, mask if z is not None else None, z if z_norm is not None else None, z_stats)
        ctx.set_materialize_grads(False)
        ctx.adds, ctx.z_dtype = z is not None and z_norm is None, None if z is None else z.dtype
        return (y, y.detach()) if twice else y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """Return the gradients of x, z, and both norms' parameters."""
        refuse_second_derivative()
        x, stats, mask, z, z_stats = ctx.saved_tensors
        dy, *rest = [g.contiguous(memory_format=torch.channels_last) for g in gradients if g is not None] or [None]
        if dy is None:
            return (None,) * 9
        want_dx, want_dz = ctx.needs_input_grad[:2]
        passes = in_triton.Backward(dy, rest[0] if rest else None, x, stats, mask, True, z, z_stats)
        result, passed = passes.sums(write=ctx.adds)
        if passed is not None:
            passes = in_triton.Backward(passed, None, x, stats, None, relu=False)
        dx, dz = passes.inputs(result, want_dx, want_dz)
        if passed is not None and want_dz:
            dz = passed.to(ctx.z_dtype)
        parameters = [result[i, j] for i in range(len(result)) for j in (1, 0)] + [None, None]
        wanted = [g if want else None for g, want in zip(parameters[:4], ctx.needs_input_grad[2:6], strict=True)]
        return dx, dz, *wanted, None, None, None


def forward(
    x: Tensor, norm: nn.BatchNorm2d, z: Tensor | None, z_norm: nn.BatchNorm2d | None, keep_mask: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return y, the mask, and the statistics of x and of z; update the running ones."""
    stats = in_triton.statistics(x, norm)
    z_stats = None if z is None or z_norm is None else in_triton.statistics(z, z_norm)
    return (*in_triton.normalize(x, stats, z, z_stats, True, keep_mask), stats, z_stats)


def refuse_second_derivative() -> None:
    """Raise OptimizationError in a backward whose result is to be differentiated."""
    if torch.is_grad_enabled():
        raise OptimizationError(
            "bn_relu: a gradient that can be differentiated again was asked for (create_graph=True), and the fused "
            "backward can't be; undo the fusion, or compute by fasttrain.callbacks.bn_relu.reference."
        )
