"""The training step of real networks in each precision of the device."""

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchvision.models import resnet50, vit_b_16

from fasttrain.bench import Case
from fasttrain.callbacks.precision.choice import candidates_for
from fasttrain.environment import Hardware
from fasttrain.measure import Row, StepProbe, make_row


def cases() -> list[Case]:
    """Return the room's bench cases."""
    return [
        Case("precision", "resnet50_b64", "ResNet-50's step, batch 64, 224², in each precision", _resnet, True),
        Case("precision", "vit_b16_b64", "ViT-B/16's step, batch 64, 224², in each precision", _vit, True),
    ]


class _Classifier(pl.LightningModule):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.model(images), labels)


def _resnet() -> Iterator[Row]:
    yield from _rows("resnet50_b64", resnet50(weights=None))


def _vit() -> Iterator[Row]:
    yield from _rows("vit_b16_b64", vit_b_16(weights=None))


def _rows(case: str, model: torch.nn.Module) -> Iterator[Row]:
    hardware = Hardware.here()
    batch = (torch.randn(64, 3, 224, 224), torch.randint(0, 1000, (64,)))
    probe = StepProbe(_Classifier(model), batch, hardware.device)
    for candidate in candidates_for(hardware, ("bf16-mixed", "16-mixed")):
        values = probe.sample_ms(autocast=candidate.autocast, warmup=5, repeats=30)
        variant = "plain" if candidate.autocast is None else candidate.name
        yield make_row("precision", case, variant, "step_ms", "ms", values, candidate.name)
