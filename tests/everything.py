"""A module with a bit of everything that an optimization may look for, its data, and a module with nothing."""

from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from encoded_pictures import NotesKeys, PictureData
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models.resnet import Bottleneck
from torchvision.ops import FrozenBatchNorm2d, sigmoid_focal_loss

from fasttrain.callbacks.sequence_packing import mean_loss
from fasttrain.recipes.retinanet.matching import AnchorMatcher
from fasttrain.recipes.retinanet.suppression import ClassSuppression


class LossOfLevels(nn.Module):
    """A focal loss that a room may put its own in the place of."""

    fasttrain_role = "sigmoid_focal_loss"
    alpha, gamma = 0.25, 2.0

    def forward(self, levels: list[Tensor], targets: Tensor) -> Tensor:
        logits = torch.cat(levels, dim=1)
        wanted = nn.functional.one_hot(targets.clamp(min=0), logits.shape[2]).to(logits)
        return sigmoid_focal_loss(logits, wanted, self.alpha, self.gamma, reduction="sum")


class Module(pl.LightningModule):
    """A bit of everything that an optimization may look for."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.images = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),  # trained normalization
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),  # frozen, below
            nn.Sequential(Bottleneck(8, 2, norm_layer=FrozenBatchNorm2d)), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(),
        )  # fmt: skip
        self.images[4].eval().requires_grad_(False)
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False).requires_grad_(False), FrozenBatchNorm2d(8), nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )  # fmt: skip
        self.tokens = nn.Sequential(
            nn.Linear(8 * 36, 16), nn.ReLU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 8),
            nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True), nn.Linear(8, 4),
        )  # fmt: skip
        self.focal_loss = LossOfLevels()
        self.matcher = AnchorMatcher(0.5, 0.4)
        self.suppression = ClassSuppression()
        grid = torch.cartesian_prod(torch.arange(4.0), torch.arange(4.0))
        self.register_buffer("anchors", torch.cat([grid, grid + 2], dim=1), persistent=False)
        self.register_buffer("boxes", torch.tensor([[[0.0, 0, 2, 2], [1, 1, 4, 4]]]), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.tokens(self.images(batch[0])[:, None])[:, 0]
        loss = nn.functional.cross_entropy(logits, batch[1]) + self.focal_loss([logits[:, None]], batch[1][:, None])
        loss = loss + self.stem(batch[0]).mean()
        loss = loss + self.matcher(self.anchors, self.boxes, batch[1][None, :2]).sum()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def validation_rows(self) -> list[Any]:
        return [np.ones((1, 7))]

    def ground_truth(self) -> dict[str, float]:
        return {}

    def score_function(self) -> str:
        return "score_functions:mean"

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(8, 3, 8, 8, generator=generator)
        return DataLoader(TensorDataset(images, torch.arange(8) % 4), batch_size=4, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.zeros(2, 3, 8, 8), torch.arange(2)))


class NothingToDo(pl.LightningModule):
    """Has no parameter, and its step can't run."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise ValueError("not made for this")


class Words(pl.LightningModule):
    """Takes sequences, one or several a row; each token is on its own."""

    fasttrain_packed_rows = True

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return mean_loss(self.net(batch["input_ids"]), batch["labels"], batch.get("totals", {}).get("labels"))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Texts(pl.LightningDataModule):
    """Texts of one to eight tokens, padded."""

    def train_dataloader(self) -> DataLoader[Any]:
        tokens = [torch.arange(1 + index % 8) for index in range(32)]
        samples: Any = [{"input_ids": each, "labels": each} for each in tokens]

        def padded(batch: list[dict[str, Tensor]]) -> dict[str, Tensor]:
            fills = {"input_ids": 0, "labels": -100}
            return {
                name: nn.utils.rnn.pad_sequence([sample[name] for sample in batch], True, fill)
                for name, fill in fills.items()
            }

        return DataLoader(samples, batch_size=4, collate_fn=padded)


def made_for(room: str) -> tuple[pl.LightningModule, pl.LightningDataModule]:
    """Return a module and data in which a room finds something to do."""
    if room == "dali_loader":
        return NotesKeys(), PictureData()
    return (Words(), Texts()) if room == "sequence_packing" else (Module(), Data())
