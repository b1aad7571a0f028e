"""Modules that the sync finder examines: one without findings, and one whose state a capture would freeze."""

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy


class Clean(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
        self.accuracy = MulticlassAccuracy(3, validate_args=False)
        self.seen: list[tuple[torch.dtype, bool]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.log("loss", loss, prog_bar=True)
        return {"loss": loss / self.trainer.world_size}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Frozen(Clean):
    """Keeps on the host what a replay would not keep."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.rate, self.phase = 0, 0.5, "start"
        self.losses: list[Tensor] = []
        self.cache: Tensor | None = None
        self.average = torch.zeros(())
        self.register_buffer("last", torch.zeros(()))
        self.in_place = torch.zeros(())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.cache is None:
            self.cache = torch.tensor([1.0, 2, 3], device=self.device)
        loss: Tensor = F.cross_entropy(self.net(batch[0]) * self.cache, batch[1])
        self.count += 1  # count
        self.keep(loss.detach())
        loss = loss * random.random()  # python
        noise = np.random.rand()  # numpy
        noisy = loss * noise + torch.randn(1).item()  # torch
        self.log("noise", noise)  # logged
        self.accuracy(self.net(batch[0]), batch[1])  # metric
        return noisy

    def keep(self, loss: Tensor) -> None:
        self.losses.append(loss)  # losses
        self.average = self.newer(loss)  # average
        self.last = loss  # last
        self.in_place.mul_(0.9).add_(loss)

    def newer(self, loss: Tensor) -> Tensor:
        return 0.9 * self.average + loss
