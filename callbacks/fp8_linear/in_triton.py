"""The cast on NVIDIA GPUs: how the kernel is laid over a matrix, and launched. Nothing waits for the GPU."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fasttrain.callbacks.fp8_linear import kernel
from fasttrain.callbacks.fp8_linear.cast import Cast, Request
from fasttrain.callbacks.gemm_gelu.form import form_for

NO_FORM = (0.0,)
ROWS_TOGETHER = 4
"""Rows of a matrix whose numbers are one word; parts of a matrix have a multiple of it."""


@dataclass(frozen=True)
class Tiling:
    """How much a program takes."""

    rows: int = 128
    columns: int = 64
    """Of a tile: 128 bytes of a row in 16 bits, and 128 of a transposed one in 8. A thread has 32 elements."""
    warps: int = 8
    programs: int = 1056
    """At most, about: 8 for each of an H200's multiprocessors."""


TILING = Tiling()


def cast(request: Request, tiling: Tiling | None = None) -> Cast:
    """Return a matrix in FP8, and make the scale of its next one."""
    tiling = tiling or TILING
    first = request.parts[0]
    rows, columns = request.shape
    options: dict[str, Any] = {"dtype": request.dtype, "device": first.device}
    out = torch.empty(rows, columns, **options) if request.rows else None
    turned = torch.empty(columns, rows, **options) if request.turned else None
    words = None if turned is None else turned.view(torch.int32)
    inverse = torch.empty((), dtype=torch.float32, device=first.device)
    launches = [_Launch(request, part, tiling) for part in request.parts]
    if request.scales.looks_first(request.index):
        for at, launch in enumerate(launches):
            launch.run(None, None, inverse, notes=True, rolls=at == len(launches) - 1, decay=0.0, sums=False)
        notes = False
    else:
        notes = True
    begin, sums = 0, []
    for at, launch in enumerate(launches):
        end = begin + launch.part.shape[request.along]
        last = at == len(launches) - 1
        views = (
            None if out is None else out.narrow(request.along, begin, end - begin),
            None if words is None else _narrowed(words, request.along, begin, end),
        )
        found = launch.run(*views, inverse, notes, notes and last, request.scales.scaling.decay, request.sums)
        if found is not None:
            sums.append(found.sum(dim=0))
        begin = end
    total = None if not sums else torch.cat(sums) if request.along == 1 else torch.stack(sums).sum(dim=0)
    return Cast(out, turned, inverse, total)


class _Launch:
    """The kernel over one part of a matrix."""

    def __init__(self, request: Request, part: Tensor, tiling: Tiling) -> None:
        self.request, self.tiling = request, tiling
        self.part = part if part.stride(1) == 1 else part.contiguous()
        rows, columns = part.shape
        blocks = -(-columns // tiling.columns)
        self.grid = (max(1, min(-(-rows // tiling.rows), math.ceil(tiling.programs / blocks))), blocks)

    def run(
        self, out: Tensor | None, turned: Tensor | None, inverse: Tensor, notes: bool, rolls: bool, decay: float,
        sums: bool,
    ) -> Tensor | None:  # fmt: skip
        """Cast into two views; return the programs' column sums if they are asked for."""
        request, part = self.request, self.part
        rows, columns = part.shape
        state = request.scales.values[request.index]
        partial = torch.empty(self.grid[0], columns, dtype=torch.float32, device=part.device) if sums else None
        form = None if request.gelu is None else form_for(request.gelu, part.dtype)
        before = part if request.before is None else request.before.contiguous()
        work = kernel.PLAIN if form is None else kernel.GELU if request.before is None else kernel.GELU_BACKWARD
        with torch.cuda.device_of(part):
            kernel.cast_kernel[self.grid](
                part, before, state if out is None else out, state if turned is None else turned,
                inverse if partial is None else partial, state, inverse, rows, columns, part.stride(0),
                columns if out is None else out.stride(0), rows if turned is None else turned.stride(0),
                request.scales.largest_of(request.dtype), decay,
                WORK=work.value, FORM=NO_FORM if form is None else form.coefficients,
                BOUND=None if form is None else form.largest, E4M3=request.dtype == torch.float8_e4m3fn,
                OUT=out is not None, TURNED=turned is not None, SUMS=sums, NOTES=notes, ROLLS=rolls,
                EVEN=rows % self.tiling.rows == 0 and columns % self.tiling.columns == 0,
                ROWS=self.tiling.rows // ROWS_TOGETHER, COLUMNS=self.tiling.columns, num_warps=self.tiling.warps,
            )  # fmt: skip
        return partial


def _narrowed(words: Tensor, along: int, begin: int, end: int) -> Tensor:
    if along == 1:
        return words.narrow(0, begin, end - begin)
    return words.narrow(1, begin // ROWS_TOGETHER, (end - begin) // ROWS_TOGETHER)
