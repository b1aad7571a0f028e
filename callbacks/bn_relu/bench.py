"""Forward and backward of ResNet-50 and of its normalizations alone, beside floors of arithmetic and memory.

Everything is replayed as a CUDA graph, because launches would otherwise be a part of what is compared.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.resnet import resnet50

from fasttrain.bench import Case
from fasttrain.callbacks.bn_relu.fused import batch_norm_add_relu, batch_norm_dual_relu, batch_norm_relu
from fasttrain.callbacks.bn_relu.in_torch import batch_norm_relu as in_operators
from fasttrain.callbacks.bn_relu.sites import BNReLUSurgery
from fasttrain.floor import H200_BYTES_PER_SECOND, H200_FLOP_PER_SECOND
from fasttrain.measure import Row, captured, make_row, sample_ms

BATCH, SIDE = 256, 224
PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Of ResNet-50, by form: the stem, the narrow maps, the ends of blocks with and without a downsample path.
SHAPES = {
    "relu": ((64, 112), (64, 56), (128, 28), (256, 14), (512, 7)),
    "add_relu": ((256, 56), (512, 28), (1024, 14), (2048, 7)),
    "dual_relu": ((256, 56), (2048, 7)),
}
# Bytes by element that no way of doing it can save, with 16-bit maps. For each form: x (and z) read for statistics and
# once more to normalize, y written; x (and z) and dy read for the sums and once more for the gradients, which are
# written.
FLOOR_BYTES = {"relu": 6 + 10, "add_relu": 8 + 12, "dual_relu": 10 + 16}
IN_GRAPH = "channels_last, CUDA graph"


def cases() -> list[Case]:
    """Return the room's bench cases."""
    shown = f"batch {BATCH}, {SIDE}²"
    return [
        Case("bn_relu", "resnet50_b256", f"ResNet-50 forward and backward, {shown}, fp16 and bf16", whole_model, True),
        Case("bn_relu", "one_pass", f"normalizations of ResNet-50 alone, {shown}, three forms, fp16", one_pass, True),
    ]


def one_pass() -> Iterator[Row]:
    """Yield milliseconds of forward and backward of each form on maps of ResNet-50, by variant."""
    for form, shapes in SHAPES.items():
        for channels, side in shapes:
            case = f"{form}_c{channels}_{side}_b{BATCH}"
            for variant in ("eager", "compile", "ours"):
                step = captured(_pass(form, variant, channels, side))
                times = sample_ms(step, "cuda", warmup=5, repeats=30)
                yield make_row("bn_relu", case, variant, "fwd_bwd_ms", "ms", times, f"fp16, {IN_GRAPH}")
            moved = BATCH * channels * side**2 * FLOOR_BYTES[form]
            note = f"{FLOOR_BYTES[form]} bytes by element over 4.3 TB/s; maps that fit in the L2 cache may beat it"
            yield make_row("bn_relu", case, "floor", "fwd_bwd_ms", "ms", [moved / H200_BYTES_PER_SECOND * 1e3], note)


def whole_model() -> Iterator[Row]:
    """Yield milliseconds of forward and backward of ResNet-50 by precision and variant.

    ours_compile is the fused modules under torch.compile, which are PyTorch's operators there.
    """
    floor_ms = _floor_ms()
    for precision, dtype in PRECISIONS.items():
        case = f"resnet50_b{BATCH}_{precision}"
        for variant in ("eager_graph", "compile_graph", "ours_graph", "ours_compile_graph"):
            torch.manual_seed(0)
            torch._dynamo.reset()
            model = resnet50(weights=None).cuda().to(memory_format=torch.channels_last)
            if variant.startswith("ours"):
                BNReLUSurgery(model).apply()
            forward: Any = torch.compile(model) if "compile" in variant else model
            images = torch.randn(BATCH, 3, SIDE, SIDE, device="cuda").to(memory_format=torch.channels_last)
            labels = torch.randint(1000, (BATCH,), device="cuda")
            step = captured(_step(model, forward, images, labels, dtype))
            times = sample_ms(step, "cuda", warmup=5, repeats=20)
            yield make_row("bn_relu", case, variant, "fwd_bwd_ms", "ms", times, f"{IN_GRAPH}, autocast")
            del model, forward, step
            torch.cuda.empty_cache()
        note = (
            "each convolution at 790 TFLOP/s or 4.3 TB/s, each normalization at 16 bytes by element, additions at none"
        )
        yield make_row("bn_relu", case, "floor", "fwd_bwd_ms", "ms", [floor_ms], note)


def _pass(form: str, variant: str, channels: int, side: int) -> Callable[[], Any]:
    torch._dynamo.reset()
    shape = (BATCH, channels, side, side)
    x, z, dy = (torch.randn(shape, device="cuda").half().to(memory_format=torch.channels_last) for _ in range(3))
    norm, z_norm = nn.BatchNorm2d(channels).cuda(), nn.BatchNorm2d(channels).cuda()
    second = z if form != "relu" else None
    leaves = [x.requires_grad_(), *norm.parameters()]
    if second is not None:
        leaves.append(second.requires_grad_())
    if form == "dual_relu":
        leaves += z_norm.parameters()
    operators: Any = torch.compile(in_operators, dynamic=False) if variant == "compile" else in_operators
    fused: dict[str, Callable[[], Tensor]] = {
        "relu": lambda: batch_norm_relu(x, norm),
        "add_relu": lambda: batch_norm_add_relu(x, norm, z),
        "dual_relu": lambda: batch_norm_dual_relu(x, norm, z, z_norm),
    }
    plain = partial(operators, x, norm, second, z_norm if form == "dual_relu" else None)
    call = fused[form] if variant == "ours" else plain
    return lambda: torch.autograd.grad(call(), leaves, dy)


def _step(
    model: nn.Module, forward: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor, dtype: torch.dtype
) -> Callable[[], None]:
    # Weights are cast in every step, as in training, and nothing is kept from one step for the next.
    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype, cache_enabled=False):
            loss = nn.functional.cross_entropy(forward(images), labels)
        (loss * 128).backward()  # a loss scale

    return step


def _floor_ms() -> float:
    """Return the time of all passes of the convolutions and normalizations, each at the card's rate."""
    seconds: list[float] = []

    def count(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        if isinstance(module, nn.BatchNorm2d):
            seconds.append(output.numel() * FLOOR_BYTES["relu"] / H200_BYTES_PER_SECOND)
        elif isinstance(module, nn.Conv2d):
            (x,), weight = inputs, module.weight
            flop = 2 * output.numel() * weight[0].numel()
            moved = 2 * (x.numel() + output.numel() + weight.numel())
            passes = 2 + (x.shape[1] > 3)  # the images get no gradient
            seconds.append(passes * max(flop / H200_FLOP_PER_SECOND, moved / H200_BYTES_PER_SECOND))

    with torch.device("meta"):
        model = resnet50(weights=None)
        for module in model.modules():
            module.register_forward_hook(count)
        model(torch.empty(BATCH, 3, SIDE, SIDE))
    return sum(seconds) * 1e3
