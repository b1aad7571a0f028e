"""Products of FP8 matrices, by torch's scaled matrix product on a GPU, and in float32 elsewhere."""

import torch
from torch import Tensor

from fasttrain.callbacks.fp8_linear.cast import Cast


def product(
    a: Tensor, b: Tensor, of_a: Cast, of_b: Cast, dtype: torch.dtype, bias: Tensor | None = None, fast: bool = True
) -> Tensor:
    """Return a @ b.T times both inverse scales, plus bias, (M, N) of a dtype.

    Args:
        a: FP8 (M, K), of the cast `of_a`.
        b: FP8 (N, K), of the cast `of_b`.
        bias: (N,) of the dtype.
        fast: let the tensor cores add up all of K in their own registers, which hold fewer bits than float32's.
    """
    if not a.is_cuda:
        with torch.autocast(a.device.type, enabled=False):
            found = (a.float() * of_a.inverse) @ (b.float() * of_b.inverse).t()
            return (found if bias is None else found + bias.float()).to(dtype)
    return torch._scaled_mm(
        a, b.t(), scale_a=of_a.inverse, scale_b=of_b.inverse, bias=bias, out_dtype=dtype, use_fast_accum=fast
    )
