"""Classification data: a folder for each class, tar shards, TFRecord files, or, when none is given, a generated set."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fasttrain.callbacks import DALIConfig, DALILoader, LabelledImages, labelled_images
from fasttrain.destination import rank_of
from fasttrain.environment import cache_folder
from fasttrain.errors import ConfigError
from fasttrain.order import EpochOrder, EvaluationOrder, ResumableLoader
from fasttrain.recipes.image_sets.bad import ImagePolicy
from fasttrain.recipes.image_sets.data import ImageData, Loader, LoaderKind
from fasttrain.recipes.image_sets.drawn import drawing_bar
from fasttrain.recipes.resnet50.dataset import Augmentation, ClassificationDataset
from fasttrain.recipes.resnet50.drawing import GeneratedConfig
from fasttrain.recipes.resnet50.generated import generate
from fasttrain.recipes.resnet50.loaders import dali_loader, torch_loader

RESIZE_OVER_CROP = 256 / 224  # MLPerf's reference


@dataclass(frozen=True)
class DataConfig:
    """The `data` section of a ResNet recipe."""

    train: str | None = None
    """Folder with a subfolder of images for each class, with tar shards in webdataset's layout, or with TFRecord files.
    With neither this nor `val` given, a set is generated."""
    val: str | None = None
    first_label: int = 0
    """Label of the first class in TFRecord files; ImageNet's as TensorFlow's tools write them begin with 1."""
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
    loader: LoaderKind = "torch"
    """What makes the batches: torch's DataLoader, the reference, or NVIDIA DALI, on the GPU where there is one."""
    dali: DALIConfig = field(default_factory=DALIConfig)
    """DALI's threads, prefetching and memory."""
    num_workers: int | None = None
    """The torch loader's processes; null is the usable cores less one where there are more than 4, else none."""
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


class ClassificationData(ImageData):
    """Loaders of static-shape batches whose position is part of the checkpoint."""

    config: DataConfig

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config)
        self._sets: dict[str, LabelledImages] = {}

    def with_dali_loader(self, config: DALIConfig) -> "ClassificationData":
        """Return the same data with DALI's loaders; what has been read of it is shared."""
        data = ClassificationData(replace(self.config, loader="dali", dali=config))
        data._sets = self._sets
        return data

    def prepare_data(self) -> None:
        """Generate the set if no other is given; a second time finds it in the cache."""
        if self.config.train is None:
            with drawing_bar() as on_progress:
                generate(cache_folder(self.config.cache_folder), self.config.generated, on_progress)

    def setup(self, stage: str) -> None:
        """Look through both sets.

        Raises:
            DataError: there is no such folder, or no class or image in it; or an archive is faulty.
        """
        if self._sets:
            return
        config = self.config
        if config.train is None or config.val is None:
            train_place, val_place = generate(cache_folder(config.cache_folder), config.generated)
        else:
            train_place, val_place = Path(config.train).expanduser(), Path(config.val).expanduser()
        train = labelled_images(train_place, first_label=config.first_label)
        val = labelled_images(val_place, first_label=config.first_label, class_names=train.class_names)
        self._sets = {"train": train, "val": val}

    def facts(self) -> dict[str, Any]:
        """Return the number of classes and the batch size, which the model takes over unless told otherwise."""
        self.setup("fit")
        return {"num_classes": len(self.class_names), "batch_size": self.config.batch_size}

    def sizes(self) -> dict[str, int]:
        """Return the number of images of `train` and `val`."""
        self.setup("fit")
        return {split: len(files) for split, files in self._sets.items()}

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, by index."""
        return self._sets["train"].class_names

    def train_dataloader(self) -> Loader:
        """Return batches in a new order each epoch; a last partial batch is left out, shapes being static."""
        return self._loader("train", self._training_order(len(self._sets["train"])), self.config.batch_size)

    def val_dataloader(self) -> Loader:
        """Return every validation image once, and whole batches: what fills the last one up has no label."""
        rank, world_size = rank_of(self)
        batch_size = self.config.val_batch_size or self.config.batch_size
        order = EvaluationOrder(len(self._sets["val"]), rank=rank, world_size=world_size, batch_size=batch_size)
        return self._loader("val", order, batch_size)

    def torch_loader(self, split: str, order: EpochOrder, batch_size: int, on_gpu: bool) -> ResumableLoader:
        """Return torch's loader of a split."""
        return torch_loader(self._dataset(split), order, batch_size, workers=self.config.num_workers, on_gpu=on_gpu)

    def dali_loader(self, split: str, order: EpochOrder, batch_size: int, device: torch.device) -> DALILoader:
        """Return the same batches by DALI."""
        return dali_loader(self._dataset(split), order, batch_size, device=device, config=self.config.dali)

    def bad_samples(self) -> dict[str, int]:
        """Return how many images were left out, by split."""
        counts: dict[str, int] = {}
        for split, images in self._sets.items():
            counts |= self._bad_count(split, images.encoded.name)
        return counts

    def _dataset(self, split: str) -> ClassificationDataset:
        config, augmentation = self.config, None
        if split == "train":
            augmentation = Augmentation(config.seed, config.crop_area, config.crop_aspect, config.flip, config.mixup)
        return ClassificationDataset(
            self._sets[split], config.image_size, config.shorter_side, augmentation, config.on_bad_image
        )
