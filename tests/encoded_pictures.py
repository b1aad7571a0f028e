"""Small JPEGs in memory, and a graph that gives them back with their keys: what DALI's loaders are tested with."""

import io
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from fasttrain.callbacks import DALIConfig, DALILoader, DetectionGraph
from fasttrain.order import EpochOrder, SampleKey

SIZE = (24, 32)
CONFIG = DALIConfig(num_threads=1, read_threads=2)


def jpeg(seed: int, height: int = 30, width: int = 40, **options: Any) -> NDArray[np.uint8]:
    """Return a smooth picture's bytes."""
    coarse = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    file = io.BytesIO()
    picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    picture.convert(options.pop("mode", "RGB")).save(file, options.pop("format", "JPEG"), quality=90, **options)
    return np.frombuffer(bytearray(file.getvalue()), np.uint8)


class Pictures:
    """Encoded samples of several sizes, by index."""

    def __init__(self, count: int) -> None:
        self.files = [jpeg(index, 30 + index % 5, 40 + index % 3) for index in range(count)]

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> NDArray[np.uint8]:
        return self.files[index]

    def name(self, index: int) -> str:
        return f"picture {index}"


def targets(keys: Sequence[SampleKey]) -> dict[str, NDArray[Any]]:
    """Return epoch and index of each key, and mirror those whose sum is odd."""
    epoch, index = (np.array([key[part] for key in keys], np.int64) for part in (0, 1))
    return {"flipped": (epoch + index) % 2 == 1, "epoch": epoch, "index": index}


def loader(count: int = 10, batch_size: int = 3, samples: Any = None, order: Any = None, **options: Any) -> DALILoader:
    """Return a loader of `count` pictures, shuffled by seed 1 unless an order is given."""
    samples = Pictures(count) if samples is None else samples
    order = EpochOrder(len(samples), shuffle=True, seed=1) if order is None else order
    options.setdefault("config", CONFIG)
    return DALILoader(samples, DetectionGraph(targets, SIZE), order, batch_size, **options)


def seen(of: DALILoader, epoch: int) -> list[list[tuple[int, int]]]:
    """Return the keys of each batch of an epoch."""
    of.order.set_epoch(epoch)
    return [keys_of(batch) for batch in of]


def keys_of(batch: dict[str, Tensor]) -> list[tuple[int, int]]:
    """Return (epoch, index) of each sample of a batch."""
    return list(zip(batch["epoch"].tolist(), batch["index"].tolist(), strict=True))


class PictureData(pl.LightningDataModule):
    """Trains and validates on pictures by DALI; also the kind of data module that `dali_loader` looks for."""

    def __init__(self, train: int = 10, val: int = 5, batch_size: int = 3, config: DALIConfig = CONFIG) -> None:
        super().__init__()
        self.sizes, self.batch_size, self.config = {"train": train, "val": val}, batch_size, config
        self.dali_loaders: dict[str, DALILoader] = {}

    def with_dali_loader(self, config: DALIConfig) -> "PictureData":
        return PictureData(self.sizes["train"], self.sizes["val"], self.batch_size, config)

    def train_dataloader(self) -> DALILoader:
        return self._loader("train", even=True)

    def val_dataloader(self) -> DALILoader:
        return self._loader("val", even=False)

    def teardown(self, stage: str) -> None:
        for each in self.dali_loaders.values():
            each.close()

    def _loader(self, split: str, even: bool) -> DALILoader:
        trainer = self.trainer
        rank, ranks = (0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)
        device = torch.device("cpu") if trainer is None else trainer.strategy.root_device
        order = EpochOrder(self.sizes[split], shuffle=even, seed=1, rank=rank, world_size=ranks, even=even)
        made = loader(
            self.sizes[split], self.batch_size, order=order, drop_last=even, device=device, config=self.config
        )
        self.dali_loaders[split] = made
        return made


class NotesKeys(pl.LightningModule):
    """Notes which samples it is given, and learns a little."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Conv2d(3, 1, 3)
        self.seen: dict[str, list[list[tuple[int, int]]]] = {"train": [], "val": [], "sanity": []}
        self.data_epochs: list[tuple[int, int]] = []
        self.validation_ends = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen["train"].append(keys_of(batch))
        self.data_epochs.append((self.current_epoch, int(batch["epoch"][0])))
        loss: Tensor = self.net(batch["images"] / 255).square().mean()
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.seen["sanity" if self.trainer.sanity_checking else "val"].append(keys_of(batch))

    def on_validation_epoch_end(self) -> None:
        self.validation_ends += not self.trainer.sanity_checking

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)
