"""Forward and backward of frozen-BN backbones and of the fused passes alone, beside floors of arithmetic and memory."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import resnet
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.ops import FrozenBatchNorm2d

from fasttrain.bench import Case
from fasttrain.callbacks.folded_norm import ScaleBias
from fasttrain.callbacks.frozen_bn.fused import scale_bias_add_relu, scale_bias_dual_relu, scale_bias_relu
from fasttrain.callbacks.frozen_bn.reference import reference
from fasttrain.callbacks.frozen_bn.sites import FrozenBNSurgery
from fasttrain.floor import H200_BYTES_PER_SECOND, convolutions_floor_ms
from fasttrain.measure import Row, captured, make_row, sample_ms

BATCH, SIDE = 16, 800
# RetinaNet of MLPerf Training v2.0 trains these; what lies before them is frozen.
TRAINED = ("layer2", "layer3", "layer4")
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
VARIANTS = ("eager", "compile", "ours", "ours_compile", "compile_graph", "ours_graph", "ours_compile_graph")
Features = dict[str, Tensor]


def cases() -> list[Case]:
    """Return the room's bench cases."""
    shown = f"batch {BATCH}, {SIDE}², bf16 and fp16, layer2 to layer4 trained"
    return [
        Case("frozen_bn", "resnet50_800_b16", f"ResNet-50 backbone, {shown}", lambda: backbone("resnet50"), True),
        Case("frozen_bn", "resnext50_800_b16", f"ResNeXt-50 32x4d, {shown}", lambda: backbone("resnext50_32x4d"), True),
        Case("frozen_bn", "c256_200_b16", "one pass over (16, 256, 200, 200), three forms, bf16", one_pass, True),
    ]


def backbone(name: str) -> Iterator[Row]:
    """Yield milliseconds of forward and backward by precision and variant.

    ours_compile is the fused modules under torch.compile: the compiler's kernels, for the same dtypes as ours.
    """
    with torch.device("meta"):
        floor_ms = convolutions_floor_ms(_backbone(name), lambda body: body(torch.empty(BATCH, 3, SIDE, SIDE)))
    for precision, dtype in PRECISIONS.items():
        case = f"{name.partition('_')[0]}_800_b16_{precision}"
        for variant in VARIANTS:
            torch.manual_seed(0)
            torch._dynamo.reset()
            model = _backbone(name).cuda().to(memory_format=torch.channels_last)
            images = torch.randn(BATCH, 3, SIDE, SIDE, device="cuda").to(memory_format=torch.channels_last)
            if variant.startswith("ours"):
                FrozenBNSurgery(model).apply()
            forward: Any = torch.compile(model) if "compile" in variant else model
            step = _step(model, forward, images, dtype)
            if variant.endswith("graph"):
                step = captured(step)
            times = sample_ms(step, "cuda", warmup=5, repeats=30)
            yield make_row("frozen_bn", case, variant, "fwd_bwd_ms", "ms", times, "channels_last, autocast")
        note = "convolutions alone, each at 790 TFLOP/s or 4.3 TB/s"
        yield make_row("frozen_bn", case, "floor", "fwd_bwd_ms", "ms", [floor_ms], note)


def one_pass() -> Iterator[Row]:
    """Yield milliseconds of forward and backward of each of the three forms over one large feature map."""
    shape = (BATCH, 256, SIDE // 4, SIDE // 4)
    x, z, dy = (torch.randn(shape, device="cuda").bfloat16().to(memory_format=torch.channels_last) for _ in range(3))
    first, second = (ScaleBias(*torch.randn(2, 256, device="cuda")) for _ in range(2))
    rounded = [ScaleBias(f.scale.bfloat16(), f.bias.bfloat16()) for f in (first, second)]
    compiled = torch.compile(reference, dynamic=False)
    forms: dict[str, tuple[int, Callable[[], Tensor], tuple[Any, ...]]] = {
        "relu": (1, lambda: scale_bias_relu(x, first), (x, rounded[0])),
        "add_relu": (2, lambda: scale_bias_add_relu(x, first, z), (x, rounded[0], z)),
        "dual_relu": (2, lambda: scale_bias_dual_relu(x, first, z, second), (x, rounded[0], z, rounded[1])),
    }
    for form, (inputs, ours, arguments) in forms.items():
        case, leaves = f"c256_200_b16_{form}", [x, z][:inputs]
        for leaf in (x, z):
            leaf.requires_grad_(any(leaf is other for other in leaves))
        variants: dict[str, Callable[[], Tensor]] = {
            "eager": lambda arguments=arguments: reference(*arguments),  # type: ignore[misc]
            "compile": lambda arguments=arguments: compiled(*arguments),  # type: ignore[misc]
            "ours": ours,
        }
        for variant, call in variants.items():

            def step(call: Callable[[], Tensor] = call, leaves: list[Tensor] = leaves) -> None:
                torch.autograd.grad(call(), leaves, dy)

            times = sample_ms(step, "cuda", warmup=5, repeats=30)
            yield make_row("frozen_bn", case, variant, "fwd_bwd_ms", "ms", times, "bf16, channels_last")
        # Each input once, y once, dy once, each gradient once, and a bit to be kept.
        moved = x.numel() * (2 * (2 * inputs + 2) + 2 / 8)
        floor_ms = moved / H200_BYTES_PER_SECOND * 1e3
        yield make_row("frozen_bn", case, "floor", "fwd_bwd_ms", "ms", [floor_ms], "bytes over 4.3 TB/s")


def _backbone(name: str) -> nn.Module:
    """Return a network without its head, frozen up to layer1, that gives the outputs of the trained layers."""
    net = getattr(resnet, name)(weights=None, norm_layer=FrozenBatchNorm2d)
    for parameter_name, parameter in net.named_parameters():
        parameter.requires_grad_(parameter_name.startswith(TRAINED))
    body: nn.Module = IntermediateLayerGetter(net, {layer: layer for layer in TRAINED})
    return body


def _step(
    model: nn.Module, forward: Callable[[Tensor], Features], images: Tensor, dtype: torch.dtype
) -> Callable[[], None]:
    # Weights are cast in every step, as in training, and nothing is kept from one step for the next.
    gradients: list[Tensor] = []

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype, cache_enabled=False):
            features = list(forward(images).values())
        if not gradients:
            gradients.extend(torch.randn_like(feature).mul_(1e-3) for feature in features)
        torch.autograd.backward(features, gradients)

    return step
