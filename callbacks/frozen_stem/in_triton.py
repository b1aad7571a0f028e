"""The tier for NVIDIA GPUs: a convolution for the tensor cores, and one kernel for all that follows it."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from fasttrain.callbacks.folded_norm import ScaleBias
from fasttrain.callbacks.frozen_stem.kernel import pool_kernel

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TAPS = 7
# Channels of the rearranged image are padded to this, because tensor cores read 16 bytes of 16-bit channels at least.
PADDED = 16


@dataclass(frozen=True)
class Tiling:
    """How much a program takes."""

    pixels: int = 16
    """Of the output, in one row."""
    warps: int = 4
    """Of a program."""


TILING = Tiling()


def stem(x: Tensor, weight: Tensor, folded: ScaleBias, tiling: Tiling = TILING) -> Tensor:
    """See `stem.frozen_stem`; images of even height and width, and as many channels as a power of two."""
    return pooled(F.conv2d(blocks_of_two(x, weight.dtype), weight_of_blocks(weight)), folded, tiling)


def blocks_of_two(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return images (B, 3, H, W) with each 2 x 2 pixels as one: (B, 16, H / 2 + 3, W / 2 + 3).

    In channels_last and of the dtype asked for. The channels are row in the block, column in the block, colour, and
    zeros. Two rows and columns of zeros stand before the image and one behind it.
    """
    batch, colours, height, width = x.shape
    blocks = x.new_zeros((batch, height // 2 + 3, width // 2 + 3, PADDED), dtype=dtype)
    inner = blocks[:, 2:-1, 2:-1, : 4 * colours].unflatten(3, (2, 2, colours))
    pixels = x.permute(0, 2, 3, 1).unflatten(2, (width // 2, 2)).unflatten(1, (height // 2, 2))
    inner.copy_(pixels.permute(0, 1, 3, 2, 4, 5))
    return blocks.permute(0, 3, 1, 2)


def weight_of_blocks(weight: Tensor) -> Tensor:
    """Return the weight (K, 3, 7, 7) of a convolution of stride 2 for images in blocks: (K, 16, 4, 4), stride 1.

    Pixel 2 (i + a - 2) + b meets tap 2 a + b - 1: with a tap of zeros before the first, blocks meet pairs of taps.
    """
    channels, colours = weight.shape[:2]
    pairs = F.pad(weight, (1, 0, 1, 0)).unflatten(3, (4, 2)).unflatten(2, (4, 2))
    blocks = pairs.permute(0, 3, 5, 1, 2, 4).reshape(channels, 4 * colours, 4, 4)
    return F.pad(blocks, (0, 0, 0, 0, 0, PADDED - 4 * colours)).contiguous(memory_format=torch.channels_last)


def pooled(x: Tensor, folded: ScaleBias, tiling: Tiling = TILING) -> Tensor:
    """Return the 3 x 3 maxima at stride 2 of relu(x * scale + bias), in x's dtype, channels_last."""
    x = x.contiguous(memory_format=torch.channels_last)
    batch, channels, height, width = x.shape
    rows, columns = (height + 1) // 2, (width + 1) // 2
    y = torch.empty((batch, channels, rows, columns), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    if y.numel():
        with torch.cuda.device_of(x):
            pool_kernel[(batch * rows * triton.cdiv(columns, tiling.pixels),)](
                x, *folded, y, height, width, rows, columns, CHANNELS=channels, PIXELS=tiling.pixels,
                num_warps=tiling.warps,
            )  # fmt: skip
    return y


def can_take(x: Tensor, weight: Tensor, folded: ScaleBias) -> bool:
    """Whether there are kernels for these; shapes are checked already."""
    channels = weight.shape[0]
    even = x.shape[2] % 2 == 0 and x.shape[3] % 2 == 0
    return even and channels & (channels - 1) == 0 and weight.dtype in DTYPES and folded.scale.dtype == torch.float32
