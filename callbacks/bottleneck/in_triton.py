"""The tier for NVIDIA GPUs: 1x1 convolutions as Triton products, the others by cuDNN, which adds bias and ReLU."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttrain.callbacks.bottleneck import in_torch
from fasttrain.callbacks.bottleneck.in_torch import LAST
from fasttrain.callbacks.bottleneck.kernel import INTERPRETED, WIDTH, gate_kernel, product_kernel
from fasttrain.callbacks.bottleneck.operators import Geometry, Shortcut

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Channels come in tiles, and the smallest that the tensor cores take.
CHANNELS_MULTIPLE = 16
# Of a product; a tile of float32 has half as many.
NO_GATE, BITS, VALUES = 0, 1, 2


@dataclass(frozen=True)
class Tiling:
    """How much of a product a program takes."""

    rows: int = 64
    """Pixels of a tile."""
    columns: int = 128
    """Output channels of a tile, at most. The input is read from the L2 cache once for each."""
    depth: int = 64
    """Input channels that are taken at once, at most; half of it for float32."""
    warps: int = 8
    """Of a program."""
    stages: int = 3
    """Of the pipeline that fetches the next input channels, at most."""
    early: bool = True
    """Whether the residual is fetched before the product."""
    registers: int | None = None
    """Limit for each thread."""


# Shallow ones are bound by memory: 32 sums in a thread, so that its registers leave room for loads under way.
SHALLOW, DEEP = Tiling(), Tiling(rows=128, stages=4, early=False)
DEEP_FROM = 512
# Of a gate's pass: one vector of 8 elements for each thread and some to spare.
GATED_VECTORS = 512
# Input channels from which cuDNN's convolution takes the place of a forward product; it leaves no bits.
CUDNN_FROM = 1 << 30


class Second(NamedTuple):
    """A second product that is added to the first one, of another map."""

    left: Tensor
    right: Tensor
    bias: Tensor


class Crossing(NamedTuple):
    """How y's map lies to that of the second product, or of what is added; see STEP of the kernel."""

    step: int = 1
    height: int = 1
    width: int = 1
    other_height: int = 1
    other_width: int = 1


def product(
    left: Tensor, right: Tensor, right_is_wide: bool, second: Second | None = None, bias: Tensor | None = None,
    add: Tensor | None = None, crossing: Crossing | None = None, relu: bool = False, keep_bits: bool = False,
    gate: Tensor | None = None, y: Tensor | None = None, tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return y (rows, columns) and the bits of its ReLU, uint8 (rows, columns / 8), if they are to be kept.

    Args:
        left: (rows, depth), contiguous.
        right: (columns, depth), or (depth, columns) if `right_is_wide`, contiguous. Both sizes are multiples of 16.
        gate: bits, or values of y's shape.
        y: where to put it.
        tiling: its sizes are cut down to what divides the channels.
    """
    rows, depth = left.shape
    columns = right.shape[1] if right_is_wide else right.shape[0]
    y = torch.empty(rows, columns, dtype=left.dtype, device=left.device) if y is None else y
    bits = torch.empty(rows, columns // WIDTH.value if keep_bits else 0, dtype=torch.uint8, device=left.device)
    if not rows:
        return y, bits if keep_bits else None
    crossing = crossing or Crossing()
    tiling = tiling or (DEEP if depth >= DEEP_FROM else SHALLOW)
    depth2 = second.left.shape[1] if second is not None else depth
    tile_columns = _tile(columns, tiling.columns)
    programs = -(-rows // tiling.rows) * (columns // tile_columns)
    deepest = tiling.depth // 2 if left.dtype == torch.float32 else tiling.depth
    tile_depth = min(_tile(depth, deepest), _tile(depth2, deepest))
    # More would only take shared memory, of which each program wants its own.
    stages = min(tiling.stages, max(2, depth // tile_depth, depth2 // tile_depth))
    options: dict[str, Any] = {"num_warps": tiling.warps, "num_stages": stages}
    if tiling.registers is not None:
        options["maxnreg"] = tiling.registers
    second_left, second_right, second_bias = (left, right, bias) if second is None else second
    with torch.cuda.device_of(left):
        product_kernel[(programs,)](
            left, right, second_left, second_right, left if bias is None else bias,
            left if second_bias is None else second_bias, left if add is None else add, left if gate is None else gate,
            y, bits, rows, columns, depth, depth2, *crossing[1:], STEP=crossing.step, RIGHT_IS_WIDE=right_is_wide,
            SECOND=second is not None, BIAS=bias is not None, ADD=add is not None, EARLY=tiling.early, RELU=relu,
            GATE=NO_GATE if gate is None else BITS if gate.dtype == torch.uint8 else VALUES, KEEP_BITS=keep_bits,
            PRECISION="ieee" if left.dtype == torch.float32 and not _tf32_is_allowed() else "tf32",
            ROWS=tiling.rows, COLUMNS=tile_columns, DEPTH=tile_depth, **options,
        )  # fmt: skip
    return y, bits if keep_bits else None


def pointwise(
    x: Tensor, weight: Tensor, bias: Tensor, add: Tensor | None, shortcut: Shortcut | None, keep_gate: bool
) -> tuple[Tensor, Tensor | None]:
    """See `Operators`; the gate is bits."""
    if weight.shape[1] >= CUDNN_FROM and shortcut is None and x.is_cuda:
        y = _convolution(x, weight, bias.to(x.dtype), Geometry(), add)
        return y, y if keep_gate else None
    y = _empty_map(x, weight.shape[0])
    second, crossing = None, None
    if shortcut is not None:
        second = Second(_rows(shortcut.x), _matrix(shortcut.weight), shortcut.bias)
        crossing = Crossing(shortcut.step, *x.shape[2:], *shortcut.x.shape[2:])
    _, bits = product(
        _rows(x), _matrix(weight), False, second, bias, None if add is None else _rows(add), crossing, relu=True,
        keep_bits=keep_gate, y=_rows(y),
    )  # fmt: skip
    return y, bits


def spatial(x: Tensor, weight: Tensor, bias: Tensor, geometry: Geometry) -> Tensor:
    """See `Operators`."""
    if not x.is_cuda or not x.numel() or not torch.backends.cudnn.enabled:
        return in_torch.spatial(x, weight, bias, geometry)
    return _convolution(x, weight, bias, geometry, None)


def pointwise_backward(g: Tensor, weight: Tensor, gate: Tensor | None, add: Tensor | None, step: int) -> Tensor:
    """See `Operators`."""
    dx = _empty_map(g, weight.shape[1])
    crossing = None if add is None else Crossing(step, *g.shape[2:], *add.shape[2:])
    if gate is not None and gate.dtype != torch.uint8:
        gate = _rows(gate)
    product(
        _rows(g), _matrix(weight), True, add=None if add is None else _rows(add), crossing=crossing, gate=gate,
        y=_rows(dx),
    )  # fmt: skip
    return dx


def spatial_backward(g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """See `Operators`."""
    return in_torch.spatial_backward(g, x, weight, geometry)


def gated(g: Tensor, gate: Tensor, other: Tensor | None, in_place: bool, vectors: int = GATED_VECTORS) -> Tensor:
    """See `Operators`."""
    y = g if in_place else _empty_map(g, g.shape[1])
    if g.numel():
        with torch.cuda.device_of(g):
            gate_kernel[(-(-g.numel() // (vectors * WIDTH.value)),)](
                g, g if other is None else other, gate, y, g.numel(), OTHER=other is not None,
                BITS=gate.dtype == torch.uint8, VECTORS=vectors, num_warps=4,
            )  # fmt: skip
    return y


def _convolution(x: Tensor, weight: Tensor, bias: Tensor, geometry: Geometry, add: Tensor | None) -> Tensor:
    """Return relu(conv(x) + bias [+ add]) by cuDNN's fused operation."""
    if add is None:
        y: Tensor = torch.cudnn_convolution_relu(x, weight, bias, *geometry)
    else:
        y = torch.cudnn_convolution_add_relu(x, weight, add, 1.0, bias, *geometry)
    return y.contiguous(memory_format=LAST)


def _tf32_is_allowed() -> bool:
    return torch.backends.cudnn.allow_tf32 and not INTERPRETED.value


def _tile(size: int, most: int) -> int:
    """Return the largest power of two that divides a size, up to `most`."""
    return min(size & -size, most)


def _rows(x: Tensor) -> Tensor:
    """Return a channels_last map as (pixels, channels), in the same memory."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def _empty_map(like: Tensor, channels: int) -> Tensor:
    """Return a map of as many pixels. Not made as rows: autograd refuses to write to a view that a function returns."""
    n, _, height, width = like.shape
    return torch.empty(n, channels, height, width, dtype=like.dtype, device=like.device, memory_format=LAST)


def _matrix(weight: Tensor) -> Tensor:
    return weight.reshape(weight.shape[0], weight.shape[1])
