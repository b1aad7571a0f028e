"""The tier for NVIDIA GPUs: how the kernels are laid over a feature map, and launched. Nothing waits for the GPU."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fasttrain.callbacks.bn_relu.backward_kernels import (
    finish_gradients_kernel,
    gradient_sums_kernel,
    input_gradient_kernel,
)
from fasttrain.callbacks.bn_relu.forward_kernels import finish_statistics_kernel, normalize_kernel, statistics_kernel
from fasttrain.callbacks.bn_relu.tile import INTERPRETED, WIDTH
from fasttrain.environment import multiprocessors

# An interpreted program takes long: few of them, and more than one, so that tiles are dealt out.
INTERPRETED_PROGRAMS = 3


@dataclass(frozen=True)
class Tiling:
    """How much a program takes at once."""

    vectors: int = 128
    """Of 8 channels each, in a tile."""
    warps: int = 4
    """Of a program."""
    programs: int = 8
    """On each multiprocessor."""
    channels: int = 128
    """The most that a tile is wide; fewer of them make fewer partial sums, and shorter pieces of a row."""
    stages: int = 1
    """Tiles on their way from memory at once; more than one go through shared memory."""


# The best of a sweep on an H200 with Triton 3.6. Where a tile is only read, one is not enough on its way.
STATISTICS = Tiling(stages=4)
NORMALIZE = Tiling()
SUMS = Tiling()
GRADIENT = Tiling()
# Two normalizations need more registers, so that fewer programs run at a time, and more on their way makes up for it.
DUAL_SUMS = Tiling(stages=3)
DUAL_GRADIENT = Tiling(stages=4)
# Of the partial results, taken at once by a program of the second stage, whose time is that of one load after another.
FINISH = {"PARTIALS": 512, "CHANNELS": 8, "num_warps": 8}


def statistics(x: Tensor, norm: nn.BatchNorm2d, tiling: Tiling | None = None) -> Tensor:
    """Return stats (4, C) of a batch, float32: mean, 1 / sqrt(var + eps), that times the weight, and the bias.

    Mutates the running statistics of `norm`, if it keeps any, as nn.BatchNorm2d does.

    Args:
        x: (N, C, H, W), channels_last, with more than one value for each channel.
        norm: with float32 parameters and statistics, if any.
        tiling: None for `STATISTICS`.
    """
    launch = _Launch(x, tiling or STATISTICS)
    partial = torch.empty(launch.programs, 2, launch.channels, dtype=torch.float32, device=x.device)
    stats = torch.empty(4, launch.channels, dtype=torch.float32, device=x.device)
    affine, tracked = norm.weight is not None, norm.num_batches_tracked
    update = norm.training and norm.track_running_stats and norm.running_mean is not None
    counts = norm.training and norm.track_running_stats and tracked is not None
    cumulative = counts and norm.momentum is None
    if cumulative:
        tracked.add_(1)  # type: ignore[union-attr]
    with torch.cuda.device_of(x):
        statistics_kernel[(launch.grid,)](x, partial, *launch.sizes, **launch.options)
        finish_statistics_kernel[(launch.finish_grid,)](
            partial, stats, norm.weight if affine else stats, norm.bias if affine else stats,
            norm.running_mean if update else stats, norm.running_var if update else stats,
            tracked if counts else stats, *launch.sizes, launch.programs, float(norm.momentum or 0.0), float(norm.eps),
            ROWS=launch.options["ROWS"], AFFINE=affine, UPDATE=update, COUNT=counts and not cumulative,
            CUMULATIVE=cumulative, **FINISH,
        )  # fmt: skip
    if update:
        # Who keeps something that was computed from them can see that they changed.
        torch.autograd.graph.increment_version([norm.running_mean, norm.running_var])  # type: ignore[list-item]
    return stats


def normalize(
    x: Tensor, stats: Tensor, z: Tensor | None, z_stats: Tensor | None, relu: bool, keep_mask: bool,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y = relu(norm(x) [+ z | + norm(z)]), or that without ReLU, and the mask, uint8 (N * H * W, ceil(C / 8)).

    x and z are channels_last, as y is then, in the dtype of their sum; the mask is empty if not to be kept.
    """
    launch = _Launch(x, tiling or NORMALIZE)
    y = torch.empty_like(x, dtype=x.dtype if z is None else torch.promote_types(x.dtype, z.dtype))
    mask_of = (launch.rows, -(-launch.channels // WIDTH.value)) if keep_mask else (0,)
    mask = torch.empty(mask_of, dtype=torch.uint8, device=x.device)
    with torch.cuda.device_of(x):
        normalize_kernel[(launch.grid,)](
            x, x if z is None else z, y, mask, stats, stats if z_stats is None else z_stats, *launch.sizes,
            RELU=relu, ADD=z is not None, DUAL=z_stats is not None, KEEP_MASK=keep_mask, **launch.options,
        )  # fmt: skip
    return y, mask


@dataclass(frozen=True)
class Backward:
    """What the backward of one normalization, or of two whose sum is clipped, reads; all maps channels_last."""

    dy: Tensor
    twin: Tensor | None
    """A second gradient of the output, added to the first."""
    x: Tensor
    stats: Tensor
    mask: Tensor | None
    """Of the ReLU; if it is None and `relu`, what passed is computed again."""
    relu: bool
    z: Tensor | None = None
    """If it was normalized too."""
    z_stats: Tensor | None = None

    def sums(self, write: bool, tiling: Tiling | None = None) -> tuple[Tensor, Tensor | None]:
        """Return (1 or 2, 4, C) of dbias, dweight and the factors of dx; and the gradient behind the ReLU if `write`.

        The factors are a and b of dx = g * scale + (x - mean) * a + b.
        """
        dual = self.z is not None
        launch = _Launch(self.x, tiling or (DUAL_SUMS if dual else SUMS))
        passed = torch.empty_like(self.dy) if write else None
        partial = torch.empty(launch.programs, 2 + dual, launch.channels, dtype=torch.float32, device=self.x.device)
        result = torch.empty(1 + dual, 4, launch.channels, dtype=torch.float32, device=self.x.device)
        with torch.cuda.device_of(self.x):
            gradient_sums_kernel[(launch.grid,)](
                *self._maps(), self.dy if passed is None else passed, partial, *self._stats(), *launch.sizes,
                WRITE=write, **self._flags(), **launch.options,
            )  # fmt: skip
            finish_gradients_kernel[(launch.finish_grid,)](
                partial, result, *self._stats(), launch.rows, launch.channels, launch.programs, DUAL=dual, **FINISH
            )
        return result, passed

    def inputs(
        self, result: Tensor, want_dx: bool, want_dz: bool, tiling: Tiling | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return dx, and dz of the second normalization, in their dtypes, None for what is not wanted."""
        launch = _Launch(self.x, tiling or (GRADIENT if self.z is None else DUAL_GRADIENT))
        dx = torch.empty_like(self.x) if want_dx else None
        dz = torch.empty_like(self.z) if want_dz and self.z is not None else None
        if dx is not None or dz is not None:
            with torch.cuda.device_of(self.x):
                input_gradient_kernel[(launch.grid,)](
                    *self._maps(), self.dy if dx is None else dx, self.dy if dz is None else dz, result,
                    *self._stats(), *launch.sizes, WANT_DX=dx is not None, WANT_DZ=dz is not None, **self._flags(),
                    **launch.options,
                )  # fmt: skip
        return dx, dz

    def _maps(self) -> tuple[Tensor, ...]:
        return (
            self.dy,
            self.dy if self.twin is None else self.twin,
            self.x,
            self.x if self.z is None else self.z,
            self.dy if self.mask is None else self.mask,
        )

    def _stats(self) -> tuple[Tensor, Tensor]:
        return self.stats, self.stats if self.z_stats is None else self.z_stats

    def _flags(self) -> dict[str, bool]:
        return {
            "TWIN": self.twin is not None,
            "BITS": self.relu and self.mask is not None,
            "AGAIN": self.relu and self.mask is None,
            "DUAL": self.z is not None,
        }


class _Launch:
    """How the kernels are laid over one feature map."""

    def __init__(self, x: Tensor, tiling: Tiling) -> None:
        self.channels = x.shape[1]
        self.rows = x.numel() // self.channels
        width = _tile_width(self.channels, tiling.channels)
        tile_rows = max(1, tiling.vectors * WIDTH.value // width)
        tiles, blocks = -(-self.rows // tile_rows), -(-self.channels // width)
        self.programs = max(1, min(tiles, _programs(x.device, tiling.programs) // blocks))
        self.grid = self.programs * blocks
        self.finish_grid = -(-self.channels // FINISH["CHANNELS"])
        self.sizes = (self.rows, self.channels, tiles)
        self.options: dict[str, Any] = {
            "ROWS": tile_rows,
            "GROUPS": width // WIDTH.value,
            "WHOLE": self.channels % width == 0,
            "ALIGNED": self.channels % WIDTH.value == 0,
            "STAGES": tiling.stages,
            "num_warps": tiling.warps,
        }


def _tile_width(channels: int, most: int) -> int:
    """Return a power of two: one that divides the channels, if it is not small, or else one that covers them."""
    divisor = channels & -channels
    return min(most, divisor if divisor >= 32 else max(WIDTH.value, 1 << (channels - 1).bit_length()))


def _programs(device: torch.device, per_multiprocessor: int) -> int:
    return INTERPRETED_PROGRAMS if INTERPRETED.value else per_multiprocessor * multiprocessors(device)
