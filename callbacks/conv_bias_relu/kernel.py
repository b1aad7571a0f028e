# mypy: ignore-errors
"""The Triton kernel: a bias, and a ReLU if wanted, over the output of a convolution, in place."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # as decided when this module is imported


@triton.jit
def bias_kernel(
    y_at, bias_at, rows, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write y = y + bias or relu(y + bias). One program a tile.

    Args:
        y_at: (rows, WIDTH), dense.
        bias_at: (CHANNELS,); column j of y is of channel j % CHANNELS.
        rows: how many there are.
        WIDTH: elements of a row, a multiple of CHANNELS.
        CHANNELS: of the feature map.
        RELU: whether a ReLU follows.
        ROWS, COLUMNS: of a tile; powers of two.
    """
    row = tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    bias = tl.load(bias_at + column % CHANNELS).to(tl.float32)
    start = tl.program_id(0).to(tl.int64) * (ROWS * WIDTH)
    exists = (row < rows - tl.program_id(0) * ROWS) & (column < WIDTH)
    inside = row * WIDTH + column
    value = tl.load(y_at + start + inside, mask=exists, other=0).to(tl.float32) + bias
    if RELU:
        value = tl.where(value <= 0, 0.0, value)  # not NaN, which a loss scaler has to see
    tl.store(y_at + start + inside, value.to(y_at.dtype.element_ty), mask=exists)
