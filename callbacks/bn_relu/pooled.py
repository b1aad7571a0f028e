"""Normalization, ReLU and max-pooling of a residual network's stem: the map between them is never written.

Bytes by element of the large map, 16-bit: PyTorch's pooling writes 8 bytes of index beside every value. Here the
forward keeps one, and the value that won, so that the first pass of the backward reads pooled maps alone.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fasttrain.callbacks.bn_relu import in_triton
from fasttrain.callbacks.bn_relu.eager import refuse_second_derivative
from fasttrain.callbacks.bn_relu.pool_kernels import normalize_and_pool_kernel, pooled_input_gradient_kernel

PIXELS, WARPS = 16, 4
MOST_CHANNELS = 256


def can_pool(x: Tensor) -> bool:
    """Whether the kernels take a map with so many channels: a power of two, and few enough for a tile to have all."""
    channels = x.shape[1]
    return 8 <= channels <= MOST_CHANNELS and channels & (channels - 1) == 0 and x.numel() > 0


class BatchNormReLUPool(torch.autograd.Function):
    """max_pool(relu(norm(x))), 3 x 3 at stride 2 padded by 1, twice if `twice`; see `eager.BatchNormReLU`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: nn.BatchNorm2d, twice: bool
    ) -> Any:
        """Return y, or y and y; keep x, the statistics, and of each window the value that won and its place."""
        stats = in_triton.statistics(x, norm)
        y, winner, tap = normalize_and_pool(x, stats, keep=True)
        ctx.save_for_backward(x, stats, winner, tap)
        ctx.set_materialize_grads(False)
        return (y, y.detach()) if twice else y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """Return the gradients of x and of the norm's parameters."""
        refuse_second_derivative()
        x, stats, winner, tap = ctx.saved_tensors
        dy, *rest = [g.contiguous(memory_format=torch.channels_last) for g in gradients if g is not None] or [None]
        if dy is None:
            return (None,) * 5
        other = rest[0] if rest else None
        result, _ = in_triton.Backward(dy, other, winner, stats, None, relu=True).sums(write=False)
        result[0, 2:] *= winner[:, 0].numel() / x[:, 0].numel()  # means are over x's values, not over the windows
        wants_dx, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dx = input_gradient(dy, other, tap, x, result, stats) if wants_dx else None
        return dx, result[0, 1] if wants_weight else None, result[0, 0] if wants_bias else None, None, None


def normalize_and_pool(x: Tensor, stats: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return y and, if `keep`, x of each window's maximum, in x's dtype, and its place in the window, uint8.

    Args:
        x: (N, C, H, W), channels_last.
        stats: of `in_triton.statistics`.
        keep: otherwise the last two are empty.
    """
    n, c, height, width = x.shape
    shape = (n, c, (height + 1) // 2, (width + 1) // 2)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    winner = torch.empty_like(y) if keep else y.new_empty(0)
    tap = torch.empty_like(y, dtype=torch.uint8) if keep else y.new_empty(0, dtype=torch.uint8)
    with torch.cuda.device_of(x):
        normalize_and_pool_kernel[_grid(y)](
            x, y, winner, tap, stats, height, width, *shape[2:], CHANNELS=c, PIXELS=PIXELS, KEEP=keep, num_warps=WARPS
        )
    return y, winner, tap


def input_gradient(dy: Tensor, twin: Tensor | None, tap: Tensor, x: Tensor, result: Tensor, stats: Tensor) -> Tensor:
    """Return dx in x's dtype; see `pooled_input_gradient_kernel`."""
    dx = torch.empty_like(x)
    with torch.cuda.device_of(x):
        pooled_input_gradient_kernel[_grid(dy)](
            dy, dy if twin is None else twin, tap, x, dx, result, stats, *x.shape[2:], *dy.shape[2:],
            CHANNELS=x.shape[1], PIXELS=PIXELS, TWIN=twin is not None, num_warps=WARPS,
        )  # fmt: skip
    return dx


def _grid(y: Tensor) -> tuple[int]:
    return (y.shape[0] * y.shape[2] * -(-y.shape[3] // PIXELS),)
