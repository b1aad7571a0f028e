"""The tier for NVIDIA GPUs: how the kernel is laid over the levels, and its launches. Nothing waits for the GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from fasttrain.callbacks.focal_loss.kernel import INTERPRETED, focal_loss_kernel, rescale_kernel
from fasttrain.environment import multiprocessors

VECTOR_BYTES = 16
LARGEST_ROW_BYTES = 2**16  # more would need more than the largest program's registers
# Of a tile: narrow ones need as many registers for their addresses and targets as wide ones.
MOST_VECTORS = 2048
# An interpreted program takes a second: few of them, and more than one, so that tiles are dealt out.
INTERPRETED_PROGRAMS = 3
RESCALED_AT_ONCE = 4096


@dataclass(frozen=True)
class Tiling:
    """How much a program takes at once."""

    tile_bytes: int = 2**14
    """Of a tile's logits: 128 for each thread, which keeps the registers at 80."""
    warps: int = 4
    """Of a program, for a tile of `tile_bytes`."""
    programs: int = 48
    """On each multiprocessor; more than run at once, so that the slower ones are left fewer tiles."""
    terms: int = 2
    """Of log(1 + u)'s series, for 16-bit logits; float32 takes 4."""
    registers: int | None = None
    """Limit for each thread."""


TILING = Tiling()


def forward(
    levels: Sequence[Tensor],
    targets: Tensor,
    foreground: Tensor,
    expected: Tensor,
    alpha: float,
    gamma: float,
    gradients: Sequence[Tensor] | None,
    tiling: Tiling = TILING,
) -> tuple[Tensor, Tensor]:
    """Return the loss and the factor in the gradients, which are written into `gradients`; see `kernel`."""
    used = torch.empty_like(expected)
    launch = _Launch(levels, gradients, tiling)
    result = torch.empty(launch.programs, dtype=torch.float32, device=targets.device)
    launch(targets, foreground, expected, used, result, alpha, gamma, backward=False)
    # Not by atomics: their order, and so the last bit, would differ from run to run.
    return result.sum(), used


def backward(
    levels: Sequence[Tensor],
    targets: Tensor,
    foreground: Tensor,
    factor: Tensor,
    used: Tensor,
    alpha: float,
    gamma: float,
    gradients: Sequence[Tensor],
    expected: Tensor,
    tiling: Tiling = TILING,
) -> None:
    """Compute the gradients again unless `used` is `factor`; let `expected` be the factor."""
    launch = _Launch(levels, gradients, tiling)
    launch(targets, foreground, factor, used, expected, alpha, gamma, backward=True)


def rescale(gradients: Sequence[Tensor], factor: Tensor, used: Tensor, expected: Tensor) -> None:
    """Multiply contiguous gradients by factor / used, in place, if that isn't 1; let `expected` be the factor."""
    with torch.cuda.device_of(factor):
        rescale_kernel[(_programs(factor.device, 8),)](
            tuple(gradients),
            tuple(gradient.numel() for gradient in gradients),
            factor,
            used,
            expected,
            BLOCK=RESCALED_AT_ONCE,
        )


def can_take(logits: Tensor) -> bool:
    """Whether there is a kernel for these logits: 16 or 32 bits each, and an anchor's fit in a tile."""
    return (
        (logits.device.type == "cuda" or INTERPRETED.value)
        and logits.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and logits.shape[2] * logits.element_size() <= LARGEST_ROW_BYTES
    )


class _Launch:
    """One launch over all levels."""

    def __init__(self, levels: Sequence[Tensor], gradients: Sequence[Tensor] | None, tiling: Tiling) -> None:
        self.levels = tuple(levels)
        self.gradients = self.levels if gradients is None else tuple(gradients)
        self.batch, _, self.classes = self.levels[0].shape
        element_size = self.levels[0].element_size()
        width = _vector_width([*self.levels, *self.gradients])
        vectors_of_row = self.classes // width
        most = min(tiling.tile_bytes // element_size // width, MOST_VECTORS)
        vectors = max(most, triton.next_power_of_2(vectors_of_row))
        self.rows = vectors // vectors_of_row
        tiles = sum(-(-level.shape[1] // self.rows) for level in self.levels) * self.batch
        self.programs = max(1, min(tiles, _programs(self.levels[0].device, tiling.programs)))
        self.options: dict[str, Any] = {"num_warps": min(32, tiling.warps * vectors // most)}
        if tiling.registers is not None:
            self.options["maxnreg"] = tiling.registers
        self.width, self.vectors = width, vectors
        self.terms = 4 if self.levels[0].dtype == torch.float32 else tiling.terms
        self.with_gradient = gradients is not None
        self.in_place = gradients is not None and self.gradients[0].data_ptr() == self.levels[0].data_ptr()

    def __call__(
        self, targets: Tensor, foreground: Tensor, factor: Tensor, used: Tensor, result: Tensor, alpha: float,
        gamma: float, backward: bool,
    ) -> None:  # fmt: skip
        with torch.cuda.device_of(targets):
            focal_loss_kernel[(self.programs,)](
                self.levels, self.gradients, targets, foreground, factor, used, result,
                tuple(level.shape[1] for level in self.levels),
                tuple(level.stride(0) // self.width for level in self.levels),
                tuple(gradient.stride(0) // self.width for gradient in self.gradients),
                targets.stride(0), self.batch, alpha, gamma,
                CLASSES=self.classes, WIDTH=self.width, VECTORS=self.vectors, ROWS=self.rows,
                ROWS_PADDED=triton.next_power_of_2(self.rows), SQUARE=gamma == 2, TERMS=self.terms, BACKWARD=backward,
                WITH_GRADIENT=self.with_gradient, IN_PLACE=self.in_place, **self.options,
            )  # fmt: skip


def _vector_width(tensors: Sequence[Tensor]) -> int:
    """Return the most elements, a power of two, that 16 bytes hold and that every row's address is a multiple of."""
    element_size = tensors[0].element_size()
    width = VECTOR_BYTES // element_size
    strides = [tensor.stride(0) for tensor in tensors if tensor.shape[0] > 1]
    while width > 1 and (
        tensors[0].shape[2] % width
        or any(stride % width for stride in strides)
        or any(tensor.data_ptr() % (width * element_size) for tensor in tensors)
    ):
        width //= 2
    return width


def _programs(device: torch.device, per_multiprocessor: int) -> int:
    return INTERPRETED_PROGRAMS if INTERPRETED.value else per_multiprocessor * multiprocessors(device)
