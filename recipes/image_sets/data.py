"""What data modules of images have in common: torch's loaders or DALI's, ranks, and images that were left out."""

from collections.abc import Callable
from typing import Any, Literal, Protocol

import lightning.pytorch as pl
import torch
from torch import Tensor

from fasttrain.callbacks import DALIConfig, DALILoader, UsableSamples, require_dali
from fasttrain.destination import rank_of
from fasttrain.errors import ConfigError
from fasttrain.order import EpochOrder, ResumableLoader
from fasttrain.recipes.image_sets.bad import BadImages, ImagePolicy

LoaderKind = Literal["torch", "dali"]
Loader = ResumableLoader | DALILoader


class ImageDataConfig(Protocol):
    """What `ImageData` reads of a recipe's `data` section."""

    @property
    def loader(self) -> LoaderKind:
        """What makes the batches."""

    @property
    def dali(self) -> DALIConfig:
        """DALI's threads, prefetching and memory."""

    @property
    def batch_size(self) -> int:
        """Images a step and process."""

    @property
    def seed(self) -> int:
        """Of the order and the augmentation."""

    @property
    def on_bad_image(self) -> ImagePolicy:
        """What to do about a file that can't be decoded."""

    @property
    def cache_folder(self) -> str | None:
        """Where a generated set is kept."""


class ImageData(pl.LightningDataModule):
    """Loaders of static-shape batches whose position is part of the checkpoint.

    A subclass says how each of the two loaders is made (`torch_loader`, `dali_loader`), and asks `_loader` for them.
    """

    def __init__(self, config: ImageDataConfig) -> None:
        super().__init__()
        if config.loader == "dali":
            require_dali()
        self.config: Any = config
        self.dali_loaders: dict[str, DALILoader] = {}
        self._bad_images = BadImages()

    def torch_loader(self, split: str, order: EpochOrder, batch_size: int, on_gpu: bool) -> ResumableLoader:
        """Return torch's loader of a split."""
        raise NotImplementedError

    def dali_loader(self, split: str, order: EpochOrder, batch_size: int, device: torch.device) -> DALILoader:
        """Return the same batches by DALI."""
        raise NotImplementedError

    def on_before_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> dict[str, Tensor]:
        """Note the images that the dataset left out, while the batch is still on the CPU; DALI's loaders note them."""
        if self.config.loader == "torch" and self.config.on_bad_image == "skip":
            self._bad_images.note(batch, training=self.trainer is None or self.trainer.training)
        return batch

    def teardown(self, stage: str) -> None:
        """Free DALI's pipelines; a loader that is used again makes them anew."""
        for loader in self.dali_loaders.values():
            loader.close()

    def _training_order(self, size: int) -> EpochOrder:
        """Return a new order each epoch, the same number of images on each rank.

        Raises:
            ConfigError: they don't fill a batch, and a partial one is left out, shapes being static.
        """
        rank, world_size = rank_of(self)
        if size // world_size < self.config.batch_size:
            raise ConfigError(
                f"data.batch_size is {self.config.batch_size}, but each of {world_size} process(es) has only "
                f"{size // world_size} training images; lower it."
            )
        return EpochOrder(size, shuffle=True, seed=self.config.seed, rank=rank, world_size=world_size, even=True)

    def _loader(self, split: str, order: EpochOrder, batch_size: int) -> Loader:
        device = torch.device("cpu") if self.trainer is None else self.trainer.strategy.root_device
        if self.config.loader == "torch":
            return self.torch_loader(split, order, batch_size, on_gpu=device.type == "cuda")
        if split in self.dali_loaders:  # Lightning asks for another one when it reloads
            self._bad_images.add(split, self._refused(split))
            self.dali_loaders[split].close()
        loader = self.dali_loaders[split] = self.dali_loader(split, order, batch_size, device)
        return loader

    def _bad_count(self, split: str, name: Callable[[int], str]) -> dict[str, int]:
        """Return how many images of a split were left out, under a text that names the first."""
        self._bad_images.add(split, self._refused(split))
        return self._bad_images.count(split, name)

    def _refused(self, split: str) -> set[int]:
        loader = self.dali_loaders.get(split)
        return set(loader.samples.faults) if loader is not None and isinstance(loader.samples, UsableSamples) else set()
