"""The cast in PyTorch's operators: for any device, and to check the kernel by."""

import torch
from torch import Tensor
from torch.nn.functional import gelu

from fasttrain.callbacks.fp8_linear.cast import Cast, Request
from fasttrain.callbacks.fp8_linear.scaling import SMALLEST, USED


def cast(request: Request) -> Cast:
    """Return what `in_triton.cast` does."""
    x = torch.cat([_values(request, part) for part in request.parts], dim=request.along)
    state = request.scales.values[request.index].view(torch.float32)
    seen = torch.where(x.isfinite(), x.abs(), 0.0).max()
    first = request.scales.looks_first(request.index)
    if first:
        state[USED] = seen
    used = state[USED].clamp(min=SMALLEST)
    largest = request.scales.largest_of(request.dtype)
    limit = torch.finfo(request.dtype).max
    scaled = (x * (largest / used)).clamp(-limit, limit).where(x.isfinite(), torch.nan).to(request.dtype)
    inverse = used / largest
    if not first:
        state[USED] = torch.maximum(seen, state[USED] * request.scales.scaling.decay)
    return Cast(
        scaled if request.rows else None,
        scaled.t().contiguous() if request.turned else None,
        inverse,
        x.sum(dim=0) if request.sums else None,
    )


def _values(request: Request, part: Tensor) -> Tensor:
    x = part.float()
    if request.gelu is None:
        return x
    if request.before is None:
        return gelu(x, approximate=request.gelu)
    with torch.enable_grad():
        before = request.before.detach().float().requires_grad_()
        (slope,) = torch.autograd.grad(gelu(before, approximate=request.gelu).sum(), before)
    return x * slope
