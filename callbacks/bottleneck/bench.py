"""Forward and backward of frozen-BN backbones and of one block, beside a floor of arithmetic and memory."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import resnet
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.ops import FrozenBatchNorm2d

from fasttrain.bench import Case
from fasttrain.callbacks.bottleneck.sites import BottleneckSurgery
from fasttrain.callbacks.frozen_bn import FrozenBNSurgery
from fasttrain.floor import convolutions_floor_ms
from fasttrain.measure import Row, captured, make_row, sample_ms

BATCH, SIDE = 16, 800
# RetinaNet of MLPerf Training v2.0 trains these; what lies before them is frozen.
TRAINED = ("layer2", "layer3", "layer4")
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
# ours is this room and frozen_bn for what it leaves, the stem; frozen_bn is that room alone.
VARIANTS = ("eager_graph", "compile_graph", "frozen_bn_graph", "ours_graph", "ours_one_stream_graph", "ours")
NOTE = "channels_last, autocast"


def cases() -> list[Case]:
    """Return the room's bench cases."""
    shown = f"batch {BATCH}, {SIDE}², bf16 and fp16"
    trained = f"{shown}, layer2 to layer4 trained"
    return [
        Case("bottleneck", "resnet50_800_b16", f"ResNet-50, {trained}", lambda: backbone("resnet50"), True),
        Case(
            "bottleneck", "resnext50_800_b16", f"ResNeXt-50 32x4d, {trained}", lambda: backbone("resnext50_32x4d"), True
        ),
        Case("bottleneck", "layer1_800_b16", f"one block of ResNet-50's layer1, {shown}, trained", one_block, True),
    ]


def backbone(name: str) -> Iterator[Row]:
    """Yield milliseconds of forward and backward of a backbone by precision and variant."""
    images = torch.randn(BATCH, 3, SIDE, SIDE, device="cuda").to(memory_format=torch.channels_last)
    yield from _compared(f"{name.partition('_')[0]}_800_b16", lambda: _backbone(name), images)


def one_block() -> Iterator[Row]:
    """Yield milliseconds of forward and backward of a block of 256, 64 and 256 channels, x and weights trained."""

    def make() -> nn.Module:
        stage = nn.Sequential(resnet.Bottleneck(256, 64, norm_layer=FrozenBatchNorm2d))
        return IntermediateLayerGetter(nn.ModuleDict({"layer1": stage}), {"layer1": "layer1"})  # type: ignore[no-any-return]

    x = torch.randn(BATCH, 256, SIDE // 4, SIDE // 4, device="cuda").relu_().to(memory_format=torch.channels_last)
    yield from _compared("layer1_800_b16", make, x.requires_grad_())


def _compared(case: str, make: Callable[[], nn.Module], x: Tensor) -> Iterator[Row]:
    with torch.device("meta"):
        like_x = torch.empty(x.shape, requires_grad=x.requires_grad)
        floor_ms = convolutions_floor_ms(make(), lambda model: _outputs(model)(like_x))
    for precision, dtype in PRECISIONS.items():
        for variant in VARIANTS:
            torch.manual_seed(0)
            torch._dynamo.reset()
            model = make().cuda().to(memory_format=torch.channels_last)
            if variant.startswith("ours"):
                BottleneckSurgery(model, side_streams=0 if "one_stream" in variant else 1).apply()
            if variant.startswith(("ours", "frozen_bn")):
                FrozenBNSurgery(model).apply()
            forward: Any = torch.compile(_outputs(model)) if "compile" in variant else _outputs(model)
            step = _step(model, forward, x.to(dtype).detach().requires_grad_() if x.requires_grad else x, dtype)
            if variant.endswith("graph"):
                step = captured(step)
            times = sample_ms(step, "cuda", warmup=5, repeats=30)
            yield make_row("bottleneck", f"{case}_{precision}", variant, "fwd_bwd_ms", "ms", times, NOTE)
        note = "convolutions alone, each at 790 TFLOP/s or 4.3 TB/s"
        yield make_row("bottleneck", f"{case}_{precision}", "floor", "fwd_bwd_ms", "ms", [floor_ms], note)


def _outputs(model: nn.Module) -> Callable[[Tensor], list[Tensor]]:
    return lambda x: list(model(x).values())


def _backbone(name: str) -> nn.Module:
    """Return a network without its head, frozen up to layer1, that gives the outputs of the trained layers."""
    net = getattr(resnet, name)(weights=None, norm_layer=FrozenBatchNorm2d)
    for parameter_name, parameter in net.named_parameters():
        parameter.requires_grad_(parameter_name.startswith(TRAINED))
    body: nn.Module = IntermediateLayerGetter(net, {layer: layer for layer in TRAINED})
    # A block's sum of two unscaled branches would double from block to block, and overflow float16.
    for module in body.modules():
        if isinstance(module, resnet.Bottleneck):
            module.bn3.weight.fill_(0.2)
    return body


def _step(
    model: nn.Module, forward: Callable[[Tensor], list[Tensor]], x: Tensor, dtype: torch.dtype
) -> Callable[[], None]:
    # Weights are cast in every step, as in training, and nothing is kept from one step for the next.
    gradients: list[Tensor] = []

    def step() -> None:
        model.zero_grad(set_to_none=True)
        x.grad = None
        with torch.autocast("cuda", dtype, cache_enabled=False):
            outputs = forward(x)
        if not gradients:
            gradients.extend(torch.randn_like(output).mul_(1e-3) for output in outputs)
        torch.autograd.backward(outputs, gradients)

    return step
