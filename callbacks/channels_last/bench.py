"""Forward and backward of real networks in both memory formats, beside the floor that the card's arithmetic sets."""

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn
from torchvision.models import resnet50

from fasttrain.bench import Case
from fasttrain.callbacks.channels_last.layout import batch_to_channels_last, to_channels_last
from fasttrain.measure import Row, make_row, sample_ms

# Multiply-adds of ResNet-50's forward at 224 x 224 (He et al., arXiv 1512.03385: 4.1e9), two operations each, and
# twice that again for the two gradients of the backward.
RESNET50_FLOP_PER_IMAGE = 3 * 2 * 4.1e9
# Of a large bf16 matrix product on random data on the H200 that the GPU rows come from.
H200_BF16_FLOP_PER_SECOND = 790e12


def cases() -> list[Case]:
    """Return the room's bench cases."""
    return [
        Case("channels_last", "resnet50_b64", "ResNet-50, batch 64, 224², bf16 and fp32 on a GPU", resnet50_b64, True),
        Case(
            "channels_last", "small_cnn_b16_cpu", "six 3x3 convolutions, batch 16, 96², fp32 on the CPU", small_cnn_cpu
        ),
    ]


def resnet50_b64() -> Iterator[Row]:
    """Yield milliseconds of forward and backward by precision and format."""
    for precision, dtype in (("bf16", torch.bfloat16), ("fp32", None)):
        case = f"resnet50_b64_{precision}"
        yield from _both(case, lambda: resnet50(weights=None), torch.randn(64, 3, 224, 224), "cuda", dtype)
        if dtype is not None:
            floor_ms = 64 * RESNET50_FLOP_PER_IMAGE / H200_BF16_FLOP_PER_SECOND * 1e3
            yield make_row(
                "channels_last", case, "floor", "fwd_bwd_ms", "ms", [floor_ms], "operations over 790 TFLOP/s"
            )


def small_cnn_cpu() -> Iterator[Row]:
    """Yield milliseconds of forward and backward by format, on the CPU."""
    yield from _both("small_cnn_b16_cpu", _small_cnn, torch.randn(16, 3, 96, 96), "cpu", None)


def _both(
    case: str, make: Callable[[], nn.Module], images: Tensor, device: str, dtype: torch.dtype | None
) -> Iterator[Row]:
    for variant in ("plain", "ours"):
        torch.manual_seed(0)
        model = make().to(device).train()
        batch = images.to(device)
        if variant == "ours":
            to_channels_last(model)
            batch = batch_to_channels_last(batch)

        def step(model: nn.Module = model, batch: Tensor = batch) -> None:
            with torch.autocast(torch.device(device).type, dtype or torch.bfloat16, enabled=dtype is not None):
                loss = model(batch).float().square().mean()
            loss.backward()
            model.zero_grad()

        yield make_row(
            "channels_last", case, variant, "fwd_bwd_ms", "ms", sample_ms(step, device, warmup=5, repeats=30)
        )


def _small_cnn() -> nn.Module:
    widths = (3, 32, 32, 64, 64, 128, 128)
    layers: list[nn.Module] = []
    for index, (before, after) in enumerate(pairwise(widths)):
        layers += [nn.Conv2d(before, after, 3, stride=1 + index % 2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers)
