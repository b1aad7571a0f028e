"""The stem of MLPerf's RetinaNet: the four operators, compiled, by the kernels, and the floor of memory."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from fasttrain.bench import Case
from fasttrain.callbacks.frozen_stem.sites import FrozenStemSurgery
from fasttrain.floor import H200_BYTES_PER_SECOND
from fasttrain.measure import Row, captured, make_row, sample_ms

BATCH, SIDE, CHANNELS = 32, 800, 64
CASE = "stem_800_b32"


def cases() -> list[Case]:
    """Return the room's bench case."""
    return [Case("frozen_stem", CASE, f"ResNet's stem, batch {BATCH}, {SIDE}², bf16, forward", stem_800_b32, True)]


def stem_800_b32() -> Iterator[Row]:
    """Yield milliseconds of a forward under autocast from float32 images, replayed as CUDA graphs."""
    images = torch.randn(BATCH, 3, SIDE, SIDE, device="cuda").to(memory_format=torch.channels_last)
    torch.backends.cudnn.benchmark = True
    for variant in ("eager", "compile", "ours"):
        torch._dynamo.reset()
        holder = nn.Sequential(make_stem()).cuda().to(memory_format=torch.channels_last)
        if variant == "ours":
            FrozenStemSurgery(holder).apply()
        forward: Any = torch.compile(holder) if variant == "compile" else holder
        times = sample_ms(captured(_call(forward, images)), "cuda", warmup=3, repeats=30)
        yield make_row("frozen_stem", CASE, variant, "forward_ms", "ms", times, "replays of a CUDA graph, autocast")
    # Images in, the convolution's map out and in again, the pooled map out.
    moved = images.nbytes + BATCH * CHANNELS * (SIDE // 2) ** 2 * 2 * (1 + 1 + 1 / 4)
    floor_ms = moved / H200_BYTES_PER_SECOND * 1e3
    yield make_row("frozen_stem", CASE, "floor", "forward_ms", "ms", [floor_ms], f"{moved / 1e9:.2f} GB at 4.3 TB/s")


def make_stem() -> nn.Sequential:
    """Return torchvision's stem, frozen."""
    torch.manual_seed(0)
    conv = nn.Conv2d(3, CHANNELS, 7, stride=2, padding=3, bias=False).requires_grad_(False)
    return nn.Sequential(conv, FrozenBatchNorm2d(CHANNELS), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))


def _call(forward: Callable[[torch.Tensor], Any], images: torch.Tensor) -> Callable[[], None]:
    def call() -> None:
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            forward(images)

    return call
