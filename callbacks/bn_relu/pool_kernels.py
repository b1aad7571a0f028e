# mypy: ignore-errors
"""The Triton kernels of a stem: normalization, ReLU and max-pooling of 3 x 3 at stride 2, padded by 1, in one pass.

Maps are (images, height, width, CHANNELS) and pooled ones (images, rows, columns, CHANNELS), contiguous, CHANNELS a
power of two; `stats_at` is of `finish_statistics_kernel`. A program has PIXELS of one row of the pooled map.
"""

import triton
import triton.language as tl


@triton.jit
def _place(rows, columns, PIXELS: tl.constexpr):
    """Return image, row, and columns (PIXELS, 1) of this program."""
    tiles = tl.cdiv(columns, PIXELS)
    program = tl.program_id(0)
    column = (program % tiles) * PIXELS + tl.arange(0, PIXELS)[:, None]
    return (program // tiles // rows).to(tl.int64), (program // tiles) % rows, column


@triton.jit
def normalize_and_pool_kernel(
    x_at, y_at, winner_at, tap_at, stats_at, height, width, rows, columns, CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Write y, the maxima of relu(norm(x)); and if KEEP, x of each maximum and its place in the window, 0 to 8.

    Values are rounded before they are compared, so that among equals the first wins, as in PyTorch.
    """
    image, row, column = _place(rows, columns, PIXELS)
    channel = tl.arange(0, CHANNELS)[None, :]
    mean = tl.load(stats_at + channel)
    scale = tl.load(stats_at + 2 * CHANNELS + channel)
    shift = tl.load(stats_at + 3 * CHANNELS + channel)
    best = tl.full((PIXELS, CHANNELS), float("-inf"), tl.float32)
    winner = tl.zeros((PIXELS, CHANNELS), tl.float32)
    tap = tl.zeros((PIXELS, CHANNELS), tl.int32)
    for number in tl.static_range(9):
        down, right = 2 * row + number // 3 - 1, 2 * column + number % 3 - 1
        inside = (down >= 0) & (down < height) & (right >= 0) & (right < width)
        at = ((image * height + down) * width + right) * CHANNELS + channel
        x = tl.load(x_at + at, mask=inside, other=0).to(tl.float32)
        value = tl.fma(x - mean, scale, shift).to(y_at.dtype.element_ty).to(tl.float32)
        takes = inside & ((value > best) | (value != value))  # NaN goes through, for a loss scaler to see
        best = tl.where(takes, value, best)
        winner = tl.where(takes, x, winner)
        tap = tl.where(takes, number, tap)
    at = ((image * rows + row) * columns + column) * CHANNELS + channel
    exists = column < columns
    tl.store(y_at + at, tl.where(best <= 0.0, 0.0, best).to(y_at.dtype.element_ty), mask=exists)
    if KEEP:
        tl.store(winner_at + at, winner.to(winner_at.dtype.element_ty), mask=exists)
        tl.store(tap_at + at, tap.to(tl.uint8), mask=exists)


@triton.jit
def _from_window(dy_at, twin_at, tap_at, at, exists, TWIN: tl.constexpr):
    """Return the gradient of some windows' maxima in float32, and which pixel of each has it."""
    gradient = tl.load(dy_at + at, mask=exists, other=0).to(tl.float32)
    if TWIN:
        gradient += tl.load(twin_at + at, mask=exists, other=0).to(tl.float32)
    return gradient, tl.load(tap_at + at, mask=exists, other=9).to(tl.int32)


@triton.jit
def _write(x_at, dx_at, at, exists, gradient, mean, scale, shift, a, b):
    difference = tl.load(x_at + at, mask=exists, other=0).to(tl.float32) - mean
    # Not by products: an infinite gradient must not become NaN.
    gradient = tl.where(tl.fma(difference, scale, shift) <= 0.0, 0.0, gradient)
    tl.store(dx_at + at, (gradient * scale + (difference * a + b)).to(dx_at.dtype.element_ty), mask=exists)


@triton.jit
def pooled_input_gradient_kernel(
    dy_at, twin_at, tap_at, x_at, dx_at, result_at, stats_at, height, width, rows, columns, CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr, TWIN: tl.constexpr,
):  # fmt: skip
    """Write dx. `result_at` is of `finish_gradients_kernel`.

    Each pixel collects from the windows that it is in, so nothing is added by atomic operations. Pixel (2 i, 2 j) is in
    window (i, j) alone; its neighbours to the right and below are in the next windows too.
    """
    image, row, column = _place(rows, columns, PIXELS)
    channel = tl.arange(0, CHANNELS)[None, :]
    mean = tl.load(stats_at + channel)
    scale = tl.load(stats_at + 2 * CHANNELS + channel)
    shift = tl.load(stats_at + 3 * CHANNELS + channel)
    a, b = tl.load(result_at + 2 * CHANNELS + channel), tl.load(result_at + 3 * CHANNELS + channel)
    at = ((image * rows + row) * columns + column) * CHANNELS + channel
    below = row + 1 < rows
    g, tap = _from_window(dy_at, twin_at, tap_at, at, column < columns, TWIN)
    g_right, tap_right = _from_window(dy_at, twin_at, tap_at, at + CHANNELS, column + 1 < columns, TWIN)
    at += columns * CHANNELS
    g_below, tap_below = _from_window(dy_at, twin_at, tap_at, at, (column < columns) & below, TWIN)
    g_both, tap_both = _from_window(dy_at, twin_at, tap_at, at + CHANNELS, (column + 1 < columns) & below, TWIN)
    at = ((image * height + 2 * row) * width + 2 * column) * CHANNELS + channel
    here, right = 2 * column < width, 2 * column + 1 < width
    _write(x_at, dx_at, at, here, tl.where(tap == 4, g, 0.0), mean, scale, shift, a, b)
    gradient = tl.where(tap == 5, g, 0.0) + tl.where(tap_right == 3, g_right, 0.0)
    _write(x_at, dx_at, at + CHANNELS, right, gradient, mean, scale, shift, a, b)
    at += width * CHANNELS
    lower = 2 * row + 1 < height
    gradient = tl.where(tap == 7, g, 0.0) + tl.where(tap_below == 1, g_below, 0.0)
    _write(x_at, dx_at, at, here & lower, gradient, mean, scale, shift, a, b)
    gradient = tl.where(tap == 8, g, 0.0) + tl.where(tap_right == 6, g_right, 0.0)
    gradient += tl.where(tap_below == 2, g_below, 0.0) + tl.where(tap_both == 0, g_both, 0.0)
    _write(x_at, dx_at, at + CHANNELS, right & lower, gradient, mean, scale, shift, a, b)
