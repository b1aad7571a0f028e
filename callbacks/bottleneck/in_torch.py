"""The tier for everything else: PyTorch's operators. A gate is the ReLU's own output, which is kept in any case."""

import torch
from torch import Tensor
from torch.nn import functional as F

from fasttrain.callbacks.bottleneck.operators import Geometry, Shortcut

LAST = torch.channels_last


def pointwise(
    x: Tensor, weight: Tensor, bias: Tensor, add: Tensor | None, shortcut: Shortcut | None, keep_gate: bool
) -> tuple[Tensor, Tensor | None]:
    """See `Operators`."""
    y = F.conv2d(x, weight, bias.to(x.dtype))
    if shortcut is not None:
        y += F.conv2d(shortcut.x, shortcut.weight, shortcut.bias.to(x.dtype), shortcut.step)
    if add is not None:
        y += add
    y = y.relu_().contiguous(memory_format=LAST)
    return y, y if keep_gate else None


def spatial(x: Tensor, weight: Tensor, bias: Tensor, geometry: Geometry) -> Tensor:
    """See `Operators`."""
    return F.conv2d(x, weight, bias, *geometry).relu_().contiguous(memory_format=LAST)


def pointwise_backward(g: Tensor, weight: Tensor, gate: Tensor | None, add: Tensor | None, step: int) -> Tensor:
    """See `Operators`."""
    dx = F.conv_transpose2d(g, weight).contiguous(memory_format=LAST)
    if add is not None:
        dx[..., ::step, ::step] += add
    return dx if gate is None else gated(dx, gate, None, in_place=True)


def spatial_backward(g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """See `Operators`."""
    stride, padding, dilation, groups = geometry
    dx: Tensor = torch.ops.aten.convolution_backward(
        g, x, weight, None, stride, padding, dilation, False, (0, 0), groups, (True, False, False)
    )[0]
    return dx.contiguous(memory_format=LAST)


def weight_gradient(g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Return the gradient of a convolution's weight, in the weight's dtype; for all tiers."""
    stride, padding, dilation, groups = geometry
    dw: Tensor = torch.ops.aten.convolution_backward(
        g, x, weight, None, stride, padding, dilation, False, (0, 0), groups, (False, True, False)
    )[1]
    return dw


def gated(g: Tensor, gate: Tensor, other: Tensor | None, in_place: bool) -> Tensor:
    """See `Operators`."""
    if other is not None:
        g, in_place = g + other, True
    stopped = gate <= 0
    return g.masked_fill_(stopped, 0) if in_place else g.masked_fill(stopped, 0)
