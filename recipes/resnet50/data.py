"""Classification data: folders with a subfolder for each class, or, when none is given, a generated set."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from fasttrain.environment import cache_folder
from fasttrain.errors import ConfigError
from fasttrain.order import EpochOrder, EvaluationOrder, ResumableLoader
from fasttrain.recipes.image_sets.bad import BadImages, ImagePolicy
from fasttrain.recipes.image_sets.drawn import drawing_bar
from fasttrain.recipes.image_sets.loader import image_loader
from fasttrain.recipes.resnet50.dataset import Augmentation, ClassificationDataset, collate
from fasttrain.recipes.resnet50.drawing import GeneratedConfig
from fasttrain.recipes.resnet50.folders import LabelledFiles, read_folder
from fasttrain.recipes.resnet50.generated import generate

RESIZE_OVER_CROP = 256 / 224  # MLPerf's reference


@dataclass(frozen=True)
class DataConfig:
    """The `data` section of a ResNet recipe."""

    train: str | None = None
    """Folder with a subfolder of images for each class. With neither this nor `val` given, a set is generated."""
    val: str | None = None
    image_size: int = 224
    """Side of the square images, pixels."""
    resize: int | None = None
    """Shorter side to which images are resized in evaluation, before the crop in the middle; null is 256 / 224 of
    `image_size`."""
    crop_area: tuple[float, float] = (0.05, 1.0)
    """Least and largest share of an image's area in training; MLPerf's reference."""
    crop_aspect: tuple[float, float] = (0.75, 4 / 3)
    """Least and largest width over height of the crop; MLPerf's reference."""
    flip: bool = True
    """Mirror half of the training images."""
    mixup: float = 0.0
    """Mix pairs of images and labels by shares from Beta(mixup, mixup); 0 for none."""
    batch_size: int = 408
    """Images a step and process; NVIDIA in MLPerf v2.0 on one node: 8 x 408."""
    val_batch_size: int | None = None
    """Images an evaluation step and process; null is `batch_size`."""
    seed: int = 0
    """Of the order and the augmentation."""
    num_workers: int | None = None
    """Loader processes; null is the usable cores less one on a machine with more than 4 of them, else none."""
    on_bad_image: ImagePolicy = "error"
    """What to do about a file that can't be decoded: stop, or leave it out and count it."""
    cache_folder: str | None = None
    """Where a generated set is kept; null is $FASTTRAIN_CACHE or ~/.cache/fasttrain."""
    generated: GeneratedConfig = field(default_factory=GeneratedConfig)
    """What the generated set looks like."""

    def __post_init__(self) -> None:
        if (self.train is None) != (self.val is None):
            given, missing = ("train", "val") if self.val is None else ("val", "train")
            raise ConfigError(
                f"data.{missing} is not set, but data.{given} is: give both, or none for the generated set."
            )
        for name in ("image_size", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"data.{name} is {getattr(self, name)}; it must be at least 1.")
        if self.shorter_side < self.image_size:
            raise ConfigError(
                f"data.resize is {self.resize}, but images of {self.image_size} pixels are cut out of it; take at "
                f"least {self.image_size}."
            )
        for name, most in (("crop_area", 1.0), ("crop_aspect", float("inf"))):
            low, high = getattr(self, name)
            if not 0 < low <= high <= most:
                raise ConfigError(f"data.{name} is [{low}, {high}]; two numbers, 0 < least <= largest, are needed.")
        if self.mixup < 0:
            raise ConfigError(f"data.mixup is {self.mixup}; it must be at least 0.")

    @property
    def shorter_side(self) -> int:
        """`resize`, or what stands for it."""
        return round(self.image_size * RESIZE_OVER_CROP) if self.resize is None else self.resize


class ClassificationData(pl.LightningDataModule):
    """Loaders of static-shape batches whose position is part of the checkpoint."""

    def __init__(self, config: DataConfig) -> None:
        super().__init__()
        self.config = config
        self._files: dict[str, LabelledFiles] = {}
        self._bad_images = BadImages()

    def prepare_data(self) -> None:
        """Generate the set if no other is given; a second time finds it in the cache."""
        if self.config.train is None:
            with drawing_bar() as on_progress:
                generate(self._cache_folder(), self.config.generated, on_progress)

    def setup(self, stage: str) -> None:
        """Look through both folders.

        Raises:
            DataError: there is no such folder, or no class or image in it.
        """
        if self._files:
            return
        if self.config.train is None or self.config.val is None:
            folders = generate(self._cache_folder(), self.config.generated)
        else:
            folders = (Path(self.config.train).expanduser(), Path(self.config.val).expanduser())
        train = read_folder(folders[0])
        self._files = {"train": train, "val": read_folder(folders[1], train.class_names)}

    def facts(self) -> dict[str, Any]:
        """Return the number of classes and the batch size, which the model takes over unless told otherwise."""
        self.setup("fit")
        return {"num_classes": len(self.class_names), "batch_size": self.config.batch_size}

    def sizes(self) -> dict[str, int]:
        """Return the number of images of `train` and `val`."""
        self.setup("fit")
        return {split: len(files) for split, files in self._files.items()}

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, by index."""
        return self._files["train"].class_names

    def train_dataloader(self) -> ResumableLoader:
        """Return batches in a new order each epoch; a last partial batch is left out, shapes being static."""
        config, size = self.config, len(self._files["train"])
        rank, world_size = self._rank()
        if size // world_size < config.batch_size:
            raise ConfigError(
                f"data.batch_size is {config.batch_size}, but each of {world_size} process(es) has only "
                f"{size // world_size} training images; lower it."
            )
        augmentation = Augmentation(config.seed, config.crop_area, config.crop_aspect, config.flip, config.mixup)
        order = EpochOrder(size, shuffle=True, seed=config.seed, rank=rank, world_size=world_size, even=True)
        return self._loader("train", augmentation, order, config.batch_size)

    def val_dataloader(self) -> ResumableLoader:
        """Return every validation image once, and whole batches: what fills the last one up has no label."""
        rank, world_size = self._rank()
        batch_size = self.config.val_batch_size or self.config.batch_size
        order = EvaluationOrder(len(self._files["val"]), rank=rank, world_size=world_size, batch_size=batch_size)
        return self._loader("val", None, order, batch_size)

    def on_before_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> dict[str, Tensor]:
        """Note the images that the dataset left out, while the batch is still on the CPU."""
        if self.config.on_bad_image == "skip":
            self._bad_images.note(batch, training=self.trainer is None or self.trainer.training)
        return batch

    def bad_samples(self) -> dict[str, int]:
        """Return how many images were left out, by split."""
        counts: dict[str, int] = {}
        for split, files in self._files.items():
            counts |= self._bad_images.count(split, lambda index, files=files: files.paths[index])  # type: ignore[misc]
        return counts

    def _loader(
        self, split: str, augmentation: Augmentation | None, order: EpochOrder, batch_size: int
    ) -> ResumableLoader:
        config = self.config
        dataset = ClassificationDataset(
            self._files[split], config.image_size, config.shorter_side, augmentation, config.on_bad_image
        )
        on_gpu = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return image_loader(
            dataset,
            order,
            config.num_workers,
            on_gpu=on_gpu,
            batch_size=batch_size,
            drop_last=True,
            collate_fn=collate,
        )

    def _rank(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)

    def _cache_folder(self) -> Path:
        given = self.config.cache_folder
        return Path(given).expanduser() if given else cache_folder()
