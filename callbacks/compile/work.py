"""The networks that this room's bench compiles, and a step of each."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import resnet50
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.ops import FrozenBatchNorm2d

# RetinaNet of MLPerf Training v2.0 trains these; what lies before them is frozen.
TRAINED = ("layer2", "layer3", "layer4")


@dataclass(frozen=True)
class Work:
    """A network and what it is fed."""

    summary: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    device: str = "cuda"
    dtype: torch.dtype | None = torch.bfloat16
    """Autocast's; None for float32."""
    channels_last: bool = False

    def made(self) -> tuple[nn.Module, Tensor]:
        """Return the network, seeded, on its device in training mode, and its input."""
        torch.manual_seed(0)
        model = self.model().to(self.device).train()
        images = torch.randn(self.shape, device=self.device)
        if self.channels_last:
            model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
        return model, images

    def step(self, model: nn.Module, forward: Callable[[Tensor], Any], batch: Tensor) -> Callable[[], None]:
        """Return a call that does forward and backward, with every weight cast anew as in training."""

        def step() -> None:
            model.zero_grad(set_to_none=True)
            enabled = self.dtype is not None
            with torch.autocast(self.device, self.dtype or torch.bfloat16, enabled=enabled, cache_enabled=False):
                outputs = forward(batch)
            outputs = outputs.values() if isinstance(outputs, dict) else [outputs]
            torch.autograd.backward([output.float().square().mean() for output in outputs])

        return step

    def flop(self) -> int:
        """Return the operations of forward and backward in matrix products and convolutions."""
        with torch.device("meta"):
            model, batch = self.model().train(), torch.empty(self.shape)
            with FlopCounterMode(display=False) as counter:
                outputs = model(batch)
                outputs = outputs.values() if isinstance(outputs, dict) else [outputs]
                torch.autograd.backward([output.square().mean() for output in outputs])
        return int(counter.get_total_flops())


def backbone() -> nn.Module:
    """Return a frozen-BN ResNet-50 that gives the outputs of its trained layers."""
    net = resnet50(weights=None, norm_layer=FrozenBatchNorm2d)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name.startswith(TRAINED))
    body: nn.Module = IntermediateLayerGetter(net, {layer: layer for layer in TRAINED})
    return body


def encoder(layers: int, width: int, heads: int) -> nn.Module:
    """Return a transformer encoder with a feed-forward block four times its width."""
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


WORKS = {
    "encoder_b8_cpu": Work(
        "4-layer transformer encoder, width 64, 8 x 32 tokens, fp32 on the CPU", partial(encoder, 4, 64, 4),
        (8, 32, 64), "cpu", None,
    ),
    "resnet50_800_b16": Work(
        "frozen-BN ResNet-50 backbone, batch 16, 800², bf16, layer2 to layer4 trained", backbone, (16, 3, 800, 800),
        channels_last=True,
    ),
    "bert_large_b32": Work(
        "24-layer transformer encoder of BERT-large's sizes, 32 x 512 tokens, bf16", partial(encoder, 24, 1024, 16),
        (32, 512, 1024),
    ),
}  # fmt: skip
