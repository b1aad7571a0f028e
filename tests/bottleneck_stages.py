"""Stages for the tests of bottleneck: random ones, their fused form, and how both are compared with the reference.

Where Triton is missing, who imports this is skipped.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.resnet import Bottleneck
from torchvision.ops import FrozenBatchNorm2d

from fasttrain.callbacks.bottleneck import (
    FusedStage,
    fused_stage,
)
from fasttrain.callbacks.bottleneck.reference import GRADIENT_TOLERANCE, TOLERANCE, off, reference
from fasttrain.environment import Hardware

pytest.importorskip("triton")
from fasttrain.callbacks.bottleneck.kernel import INTERPRETED

DEVICE = "cpu" if INTERPRETED.value else "cuda"
CPU = Hardware("cpu", "cpu", "a CPU", 2)
LAST = torch.channels_last
both_tiers = pytest.mark.parametrize("tier", ["torch", "triton"])


def randomized(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, (FrozenBatchNorm2d, nn.BatchNorm2d)):
            for name, low, high in (("running_var", 0.5, 2.0), ("weight", 0.5, 1.5), ("bias", -0.2, 0.2)):
                getattr(module, name).data.uniform_(low, high, generator=generator)
            module.running_mean.data.normal_(0, 0.1, generator=generator)  # type: ignore[union-attr, operator]
    return model


def eval_norm(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels).eval().requires_grad_(False)


def stage(
    channels: int = 16, width: int = 16, blocks: int = 2, stride: int = 1, downsample: bool = True, groups: int = 1,
    dilation: int = 1, norm: Any = FrozenBatchNorm2d,
) -> nn.Sequential:  # fmt: skip
    """A stage as torchvision's ResNet makes it; without a downsample path, channels are four times the width."""
    out = 4 * width
    options: dict[str, Any] = {"groups": groups, "base_width": 64 // groups, "norm_layer": norm, "dilation": dilation}
    path = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), norm(out)) if downsample else None
    first = Bottleneck(channels, width, stride, path, **options)
    net = nn.Sequential(first, *(Bottleneck(out, width, **options) for _ in range(blocks - 1)))
    return randomized(net).to(DEVICE)  # type: ignore[return-value]


def feature_map(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, layout: str = "last") -> Tensor:
    n, c, h, w = shape
    if layout == "strided":
        return torch.randn(n, c, h, 2 * w, device=DEVICE).to(dtype)[..., ::2]
    x = torch.randn(n, c, h, w, device=DEVICE).to(dtype)
    return x.contiguous(memory_format=LAST) if layout == "last" else x


def fused(plain: nn.Sequential, tier: Any = "auto") -> FusedStage:
    made = fused_stage(plain)
    made.tier = tier
    return made


def gradients(net: nn.Module, x: Tensor, dy: Tensor | None = None) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    net.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = net(x)
    y.backward(torch.ones_like(y) if dy is None else dy.to(y.dtype))
    assert x.grad is not None
    return y.detach(), x.grad, [parameter.grad for parameter in net.parameters()]


def assert_close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert found.shape == wanted.shape
    if wanted.numel():
        assert float((found.double() - wanted).abs().max()) <= tolerance * float(wanted.abs().max()) + 1e-7


def assert_equals_reference(net: nn.Sequential, x: Tensor, tier: Any) -> None:
    exact = reference(net)
    net.to(x.dtype)
    exact.load_state_dict(net.state_dict())  # of the rounded weights
    dy = torch.randn_like(exact(x.double()))
    found, wanted = gradients(fused(net, tier), x, dy), gradients(exact, x.double(), dy)
    assert found[0].dtype == x.dtype
    assert found[0].is_contiguous(memory_format=LAST)
    assert_close(found[0], wanted[0], TOLERANCE[x.dtype])
    for one, other in zip([found[1], *found[2]], [wanted[1], *wanted[2]], strict=True):
        assert one is not None
        assert other is not None
        assert one.dtype == x.dtype
        if x.numel():
            assert off(one, other) <= GRADIENT_TOLERANCE[x.dtype]


def rounding_decides(net: nn.Sequential, x: Tensor) -> bool:
    """Whether one element that passes a ReLU on one side alone would be seen in a norm, and one is near enough to 0.

    Of n elements that pass, one is 1 / sqrt(n) of their gradient's norm.
    """
    exact, inputs = reference(net), []
    for block in exact:
        block.relu.register_forward_pre_hook(lambda module, given: inputs.append(given[0].detach().clone()))
    exact(x.double())
    near = torch.finfo(x.dtype).eps * 4
    return any(
        bool((value.abs() <= near * value.abs().max()).any()) and (value > 0).sum() < GRADIENT_TOLERANCE[x.dtype] ** -2
        for value in inputs
        if value.numel()
    )
