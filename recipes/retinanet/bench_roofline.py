"""Where the time of RetinaNet's step goes on a GPU, kernel by kernel, and what its convolutions reach of the peak."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from fasttrain.floor import H200_FLOP_PER_SECOND, convolutions_floor_ms
from fasttrain.kernel_times import Kernel, kind_of, longest, time_by_kind, window_of
from fasttrain.measure import Row, make_row
from fasttrain.recipes.retinanet.model import RetinaNet, RetinaNetConfig

DATA = "data"
KINDS = {
    DATA: ("dali", "nvjpeg", "nvimgcodec", "resampl", "jpeg", "idct", "huffman", "ycbcr", "batchconvert"),
    "matching": ("match_kernel", "list_boxes"),
    "loss": ("focal_loss", "rescale_kernel", "rescalekernel"),
    "optimizer": ("adam", "multi_tensor"),
    "layout": ("nchwtonhwc", "nhwctonchw", "transpose"),
    "convolutions": (
        "fprop", "dgrad", "wgrad", "xmma", "cutlass", "implicit", "winograd", "nvjet", "gemm", "conv2d", "cudnn",
        "convolve", "product_kernel", "splitk",
    ),
    "copies": ("memcpy", "memset", "copy_kernel", "catarray", "fillfunctor"),
    "elementwise": (
        "elementwise", "reduce", "gate_kernel", "add_kernel", "scale_kernel", "bias_kernel", "forward_kernel",
        "backward_kernel", "fold_kernel", "pool", "upsample", "scatter", "gather", "index",
    ),
}  # fmt: skip
"""Kinds of kernels by their names: those of cuDNN, PyTorch and DALI, and this project's own."""


def roofline_rows(
    case: str,
    variant: str,
    kernels: Sequence[Kernel],
    config: RetinaNetConfig,
    batch_size: int,
    note: str,
    tell: bool = True,
) -> Iterator[Row]:
    """Yield milliseconds a step by kind, which add up to the step, and what the convolutions reach.

    Args:
        kernels: of a few replayed steps (see `StepProfile`); without any there are no rows.
        config: of the model.
        batch_size: of a step.
        note: for every row.
        tell: print the longest kernels, for whoever looks for what is to be gained.
    """
    begin, end, steps = window_of(kernels)
    if not steps:
        return
    times = time_by_kind(kernels, KINDS, begin, end, beside=[DATA])
    note = f"{steps} replays traced; {note}"

    def row(metric: str, unit: str, value: float, more: str = "") -> Row:
        return make_row("retinanet", f"{case}_roofline", variant, metric, unit, [value], more + note)

    yield row("step_ms", "ms", (end - begin) / steps / 1e3)
    for kind, time in times.items():
        yield row(f"{kind}_ms", "ms", time / steps / 1e3)
    loaders = [kernel for kernel in kernels if kind_of(kernel.name, KINDS) == DATA]
    beside = time_by_kind(loaders, KINDS, begin, end)
    yield row(
        "data_beside_ms", "ms", beside[DATA] / steps / 1e3, "kernels of the loader, most of it under the step's; "
    )
    flop, floor_ms = convolution_work(config, batch_size)
    reached = flop / (times["convolutions"] / steps / 1e6)
    peak = f"of {H200_FLOP_PER_SECOND / 1e12:.0f} that a large matrix product reaches; "
    yield row("convolutions_tflop_per_s", "TFLOP/s", reached / 1e12, peak)
    yield row("convolutions_floor_ms", "ms", floor_ms, "each at that rate or that of a copy, whichever takes longer; ")
    if tell:
        print(_table(kernels, begin, end, steps), flush=True)


def convolution_work(config: RetinaNetConfig, batch_size: int) -> tuple[float, float]:
    """Return the FLOP of a step's convolutions, backward included, and the milliseconds that they take at least."""
    with torch.device("meta"):
        model = RetinaNet(replace(config, weights=None))
        images = torch.empty((batch_size, 3, *config.image_size))
    flop = [0.0]

    def count(module: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        assert isinstance(module, torch.nn.Conv2d)
        passes = 1 + inputs[0].requires_grad + module.weight.requires_grad
        flop[0] += passes * 2 * output.numel() * module.weight[0].numel()

    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(count)
    floor_ms = convolutions_floor_ms(model, lambda m: model.forward_levels(images))
    return flop[0], floor_ms


def _table(kernels: Sequence[Kernel], begin: float, end: float, steps: int, lines: int = 60) -> str:
    rows = longest(kernels, KINDS, begin, end)[:lines]
    return "\n".join(f"{time / steps / 1e3:8.3f} ms {count / steps:6.1f} x  {kind:<12} {name[:150]}"
                     for kind, name, time, count in rows)  # fmt: skip
