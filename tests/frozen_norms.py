"""Frozen normalizations for the tests of frozen_bn: random ones, feature maps for them, and how results are compared.

Where Triton is missing, who imports this is skipped.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.resnet import Bottleneck, ResNet
from torchvision.ops import FrozenBatchNorm2d

pytest.importorskip("triton")
from fasttrain.callbacks.frozen_bn.kernel import INTERPRETED

DEVICE = "cpu" if INTERPRETED.value else "cuda"


def assert_close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert found.shape == wanted.shape
    if wanted.numel():
        assert float((found.double() - wanted).abs().max()) <= tolerance * float(wanted.abs().max()) + 1e-7


def randomized(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, (FrozenBatchNorm2d, nn.BatchNorm2d)):
            for name, low, high in (("running_var", 0.5, 2.0), ("weight", 0.2, 0.7), ("bias", -0.2, 0.2)):
                getattr(module, name).data.uniform_(low, high, generator=generator)
            module.running_mean.data.normal_(0, 0.1, generator=generator)  # type: ignore[union-attr, operator]
    return model


def frozen_norm(channels: int) -> nn.Module:
    return randomized(FrozenBatchNorm2d(channels))


def eval_norm(channels: int) -> nn.Module:
    return randomized(nn.BatchNorm2d(channels)).eval().requires_grad_(False)


def run(model: nn.Module, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    outputs = model(images)
    outputs = list(outputs.values()) if isinstance(outputs, dict) else outputs
    flat = outputs if isinstance(outputs, Tensor) else torch.cat([part.flatten() for part in outputs])
    flat.square().mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return flat.detach(), gradients


def tiny_resnet(block: Any = Bottleneck, norm: Any = FrozenBatchNorm2d) -> ResNet:
    torch.manual_seed(0)
    net = ResNet(block, [2, 1, 1, 1], num_classes=4, norm_layer=norm)
    return randomized(net)  # type: ignore[return-value]
