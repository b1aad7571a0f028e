"""Forward and backward of a convolution with bias and ReLU, and of RetinaNet's classification head, over the floor."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fasttrain.bench import Case
from fasttrain.callbacks.conv_bias_relu import in_apex
from fasttrain.callbacks.conv_bias_relu.conv import conv_bias_relu
from fasttrain.callbacks.conv_bias_relu.sites import ConvBiasReLUPatches
from fasttrain.floor import H200_FLOP_PER_SECOND
from fasttrain.measure import Row, captured, make_row, sample_ms
from fasttrain.patches import PatchSurgery
from fasttrain.peers import runs_beside
from fasttrain.recipes.retinanet.head import ClassificationHead

# The heads of RetinaNet in MLPerf Training v2.0: 256 channels over the levels of an image of 800 x 800.
BATCH, CHANNELS, DEPTH = 16, 256, 4
SIDES = (100, 50, 25, 13, 7)
ANCHORS_PER_CELL, CLASSES = 9, 264
NOTE = "fp16, channels_last, replays of a CUDA graph, cuDNN by its own benchmark"


def cases() -> list[Case]:
    """Return the room's bench cases."""
    shown = f"3x3, {CHANNELS} to {CHANNELS} channels, batch {BATCH}, with bias and ReLU, fp16"
    layers = [
        Case("conv_bias_relu", f"c256_{side}_b16", f"{shown}, {side}²", lambda side=side: layer(side), True)  # type: ignore[misc]
        for side in SIDES[:3]
    ]
    outputs = ANCHORS_PER_CELL * CLASSES
    head = f"RetinaNet's classification head with {outputs} outputs over the five levels of 800², batch {BATCH}, fp16"
    return [*layers, Case("conv_bias_relu", "cls_head_800_b16", head, classification_head, True)]


def layer(side: int) -> Iterator[Row]:
    """Yield milliseconds of forward and backward of one layer by variant."""
    torch.manual_seed(0)
    x, g = (_feature_map(side).half() for _ in range(2))
    weight = (0.02 * torch.randn(CHANNELS, CHANNELS, 3, 3, device="cuda")).half().to(memory_format=torch.channels_last)
    bias = torch.randn(CHANNELS, device="cuda").half()
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    torch._dynamo.reset()
    variants: dict[str, Callable[..., Tensor]] = {
        "eager": _plain,
        "compile": torch.compile(_plain, fullgraph=True, dynamic=False),
        "ours": lambda x, weight, bias: conv_bias_relu(x, weight, bias, padding=1),
    }
    if runs_beside(in_apex.TRIAL):
        variants["apex"] = lambda x, weight, bias: in_apex.conv_bias_relu(x, weight, bias, padding=1, stride=1)
    case = f"c256_{side}_b16"
    for variant, call in variants.items():

        def step(call: Callable[..., Tensor] = call) -> None:
            torch.autograd.grad(call(*leaves), leaves, g)

        yield make_row("conv_bias_relu", case, variant, "fwd_bwd_ms", "ms", _times(step), NOTE)
    yield _floor(case, _flop(CHANNELS, (side,)))


def classification_head() -> Iterator[Row]:
    """Yield milliseconds of forward and backward of the head over all levels, under autocast, by variant."""
    torch.manual_seed(0)
    levels = [_feature_map(side).half().requires_grad_() for side in SIDES]
    gradients: list[Tensor] = []
    for variant in ("eager", "compile", "ours"):
        torch._dynamo.reset()
        head: nn.Module = ClassificationHead(CHANNELS, DEPTH, False, ANCHORS_PER_CELL, CLASSES).cuda()
        head.to(memory_format=torch.channels_last)
        if variant == "ours":
            PatchSurgery(head, ConvBiasReLUPatches()).apply()
        forward: Any = torch.compile(head, dynamic=False) if variant == "compile" else head

        def step(head: nn.Module = head, forward: Any = forward) -> None:
            head.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.float16):
                outputs = [forward(level) for level in levels]
            if not gradients:
                gradients.extend(torch.randn_like(output).mul_(1e-3) for output in outputs)
            torch.autograd.grad(outputs, [*levels, *head.parameters()], gradients)

        note = f"{NOTE}, autocast"
        yield make_row("conv_bias_relu", "cls_head_800_b16", variant, "fwd_bwd_ms", "ms", _times(step), note)
    flop = DEPTH * _flop(CHANNELS, SIDES) + _flop(ANCHORS_PER_CELL * CLASSES, SIDES)
    yield _floor("cls_head_800_b16", flop)


def _plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.conv2d(x, weight, bias, padding=1).relu()


def _feature_map(side: int) -> Tensor:
    return torch.randn(BATCH, CHANNELS, side, side, device="cuda").to(memory_format=torch.channels_last)


def _times(step: Callable[[], None]) -> list[float]:
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        replay = captured(step)
        return sample_ms(replay, "cuda", warmup=5, repeats=30)


def _flop(outputs: int, sides: Sequence[int]) -> int:
    """Return the operations of forward and backward, three products of the same size."""
    return 3 * 2 * 9 * CHANNELS * outputs * BATCH * sum(side**2 for side in sides)


def _floor(case: str, flop: int) -> Row:
    milliseconds = flop / H200_FLOP_PER_SECOND * 1e3
    note = "the three convolutions alone, at 790 TFLOP/s"
    return make_row("conv_bias_relu", case, "floor", "fwd_bwd_ms", "ms", [milliseconds], note)
