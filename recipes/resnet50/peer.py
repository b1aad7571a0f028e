"""The peer that ours is compared with: torchvision's ResNet-50 in plain Lightning, as its user would write it.

The same network, images, optimizer and schedule; torchvision's ImageFolder and transforms on Pillow images in worker
processes, fp32.
"""

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.models import resnet50
from torchvision.transforms import v2

from fasttrain.recipes.resnet50.module import IMAGE_MEAN, IMAGE_STD
from fasttrain.recipes.resnet50.optimizer import OptimizerConfig, make_optimizer

Batch = tuple[Tensor, Tensor]


class TorchvisionResNet(pl.LightningModule):
    """torchvision's resnet50 with its own start."""

    def __init__(self, num_classes: int, optimizer: OptimizerConfig, label_smoothing: float) -> None:
        super().__init__()
        self.model = resnet50(num_classes=num_classes)
        self.optimizer_config, self.label_smoothing = optimizer, label_smoothing
        self.scores: list[tuple[float, float]] = []
        """(`time.perf_counter()`, top-1) of each evaluation."""
        self._right = self._images = 0

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the smoothed cross-entropy."""
        loss = F.cross_entropy(self.model(batch[0]), batch[1], label_smoothing=self.label_smoothing)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Count."""
        self._right += int((self.model(batch[0]).argmax(1) == batch[1]).sum())
        self._images += len(batch[1])

    def on_validation_epoch_end(self) -> None:
        """Keep and log top-1."""
        self.scores.append((time.perf_counter(), self._right / self._images))
        self.log("top1", self.scores[-1][1])
        self._right = self._images = 0

    def configure_optimizers(self) -> Any:
        """Return the optimizer and schedule that ours uses."""
        steps = self.trainer.num_training_batches
        return make_optimizer(self.model, self.optimizer_config, steps, self.trainer.estimated_stepping_batches, 1)


def plain_loader(
    folder: Path, side: int, resize: int, batch_size: int, crop_area: tuple[float, float] | None, workers: int
) -> DataLoader[Any]:
    """Return torch's loader as classification scripts make it; without `crop_area` the one for evaluation."""
    train = crop_area is not None
    crop: list[Any] = [v2.Resize(resize), v2.CenterCrop(side)]
    if crop_area is not None:
        crop = [v2.RandomResizedCrop(side, scale=crop_area), v2.RandomHorizontalFlip()]
    convert = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(IMAGE_MEAN, IMAGE_STD)]
    return DataLoader(
        ImageFolder(str(folder), v2.Compose([*crop, *convert])), batch_size, shuffle=train, drop_last=train,
        num_workers=workers, pin_memory=True, persistent_workers=workers > 0,
    )  # fmt: skip
