"""RetinaNet's data: any folder of images with COCO annotations, or, when none is given, a generated set."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from fasttrain.callbacks import DALIConfig, DALILoader
from fasttrain.destination import rank_of
from fasttrain.environment import cache_folder
from fasttrain.errors import ConfigError
from fasttrain.order import EpochOrder, ResumableLoader
from fasttrain.recipes.image_sets.bad import ImagePolicy
from fasttrain.recipes.image_sets.data import ImageData, Loader, LoaderKind
from fasttrain.recipes.image_sets.drawn import drawing_bar
from fasttrain.recipes.retinanet.coco import DetectionSet, read_annotations
from fasttrain.recipes.retinanet.dataset import DetectionDataset
from fasttrain.recipes.retinanet.drawing import GeneratedConfig
from fasttrain.recipes.retinanet.generated import generate
from fasttrain.recipes.retinanet.loaders import dali_loader, torch_loader

PATHS = ("train_images", "train_annotations", "val_images", "val_annotations")


@dataclass(frozen=True)
class DataConfig:
    """The `data` section of a RetinaNet recipe."""

    train_images: str | None = None
    """Folder that the file names in `train_annotations` are relative to."""
    train_annotations: str | None = None
    """COCO detection JSON. With none of the four paths given, a set is generated."""
    val_images: str | None = None
    val_annotations: str | None = None
    image_size: tuple[int, int] = (800, 800)
    """Height and width that every image is resized to; the aspect ratio is not kept, as in MLPerf."""
    batch_size: int = 32
    """Images a step and process; MLPerf v2.0 on one node: 8 x 32."""
    val_batch_size: int | None = None
    """Images an evaluation step and process; null is `batch_size`."""
    max_boxes: int = 1000
    """Boxes an image is padded to; MLPerf v2.0's own default. More than that in an image is an error."""
    flip: bool = True
    """Mirror half of the training images."""
    crowd_targets: bool = False
    """Train on crowd boxes too, as MLPerf's reference does on OpenImages and nobody does on COCO."""
    seed: int = 0
    """Of the order and the augmentation."""
    loader: LoaderKind = "torch"
    """What makes the batches: torch's DataLoader, the reference, or NVIDIA DALI, on the GPU where there is one."""
    dali: DALIConfig = field(default_factory=DALIConfig)
    """DALI's threads, prefetching and memory."""
    num_workers: int | None = None
    """The torch loader's processes; null is the usable cores less one where there are more than 4, else none."""
    cache: Literal["none", "ram"] = "none"
    """`ram` keeps the resized images of the training set: for sets that fit. The torch loader's only."""
    on_bad_image: ImagePolicy = "error"
    """What to do about a file that can't be decoded: stop, or leave it out and count it."""
    on_bad_record: Literal["error", "skip"] = "error"
    """What to do about a faulty image or annotation record: stop, or leave it out and count it."""
    cache_folder: str | None = None
    """Where a generated set is kept; null is $FASTTRAIN_CACHE or ~/.cache/fasttrain."""
    generated: GeneratedConfig = field(default_factory=GeneratedConfig)
    """What the generated set looks like."""

    def __post_init__(self) -> None:
        given = [name for name in PATHS if getattr(self, name)]
        if given and len(given) < len(PATHS):
            missing = next(name for name in PATHS if name not in given)
            raise ConfigError(
                f"data.{missing} is not set, but data.{given[0]} is: give all of {', '.join(PATHS)}, or none of them "
                "for the generated set."
            )
        for name in ("batch_size", "max_boxes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"data.{name} is {getattr(self, name)}; it must be at least 1.")
        if self.loader == "dali" and self.cache != "none":
            raise ConfigError(
                f"data.cache={self.cache} keeps images of the torch loader, and data.loader is dali; set "
                "data.cache=none."
            )


class DetectionData(ImageData):
    """Loaders of static-shape batches whose position is part of the checkpoint."""

    config: DataConfig

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config)
        self._sets: dict[str, DetectionSet] = {}
        self._datasets: dict[str, DetectionDataset] = {}

    def with_dali_loader(self, config: DALIConfig) -> "DetectionData":
        """Return the same data with DALI's loaders; what has been read of it is shared."""
        data = DetectionData(replace(self.config, loader="dali", cache="none", dali=config))
        data._sets = self._sets
        return data

    def prepare_data(self) -> None:
        """Generate the set if no other is given; a second time finds it in the cache."""
        if self.config.train_images is None:
            with drawing_bar() as on_progress:
                generate(cache_folder(self.config.cache_folder), self.config.generated, on_progress)

    def setup(self, stage: str) -> None:
        """Read and judge both annotation files.

        Raises:
            DataError: the first fault found, by file and record.
        """
        if self._datasets:
            return
        config = self.config
        if not self._sets:
            train_images, train_annotations, val_images, val_annotations = self._paths()
            train = read_annotations(train_annotations, train_images, on_bad_record=config.on_bad_record)
            val = read_annotations(val_annotations, val_images, on_bad_record=config.on_bad_record, categories_of=train)
            self._sets = {"train": train, "val": val}
        for split, found in self._sets.items():
            self._datasets[split] = DetectionDataset(
                found,
                image_size=config.image_size,
                max_boxes=config.max_boxes,
                augment=split == "train" and config.flip,
                substitute=split == "train",
                crowd_targets=config.crowd_targets,
                seed=config.seed,
                on_bad_image=config.on_bad_image,
                cache=config.cache,
            )

    def facts(self) -> dict[str, Any]:
        """Return the number of classes and the image size, which the model takes over unless told otherwise."""
        self.setup("fit")
        return {"num_classes": self._sets["train"].num_classes, "image_size": list(self.config.image_size)}

    def sizes(self) -> dict[str, int]:
        """Return the number of images of `train` and `val`."""
        self.setup("fit")
        return {split: len(dataset) for split, dataset in self._datasets.items()}

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, by index."""
        return self._sets["train"].category_names

    def ground_truth(self) -> dict[str, Any]:
        """Return the validation set's COCO dict, for scoring."""
        return self._sets["val"].to_coco()

    def train_dataloader(self) -> Loader:
        """Return batches in a new order each epoch; a last partial batch is left out, shapes being static."""
        return self._loader("train", self._training_order(len(self._datasets["train"])), self.config.batch_size)

    def val_dataloader(self) -> Loader:
        """Return every validation image once, none twice, whatever the number of processes."""
        rank, world_size = rank_of(self)
        order = EpochOrder(len(self._datasets["val"]), shuffle=False, seed=0, rank=rank, world_size=world_size)
        return self._loader("val", order, self.config.val_batch_size or self.config.batch_size)

    def torch_loader(self, split: str, order: EpochOrder, batch_size: int, on_gpu: bool) -> ResumableLoader:
        """Return torch's loader of a split."""
        dataset, workers = self._datasets[split], self.config.num_workers
        return torch_loader(dataset, order, batch_size, drop_last=split == "train", workers=workers, on_gpu=on_gpu)

    def dali_loader(self, split: str, order: EpochOrder, batch_size: int, device: torch.device) -> DALILoader:
        """Return the same batches by DALI."""
        dataset, config = self._datasets[split], self.config.dali
        return dali_loader(dataset, order, batch_size, drop_last=split == "train", device=device, config=config)

    def bad_samples(self) -> dict[str, int]:
        """Return how many records and images were left out, by what was wrong with them."""
        counts: dict[str, int] = {}
        for split, found in self._sets.items():
            for what, count in found.skipped.items():
                counts[f"{split}: {what}"] = count
            counts |= self._bad_count(split, found.images.name)
        return counts

    def _paths(self) -> tuple[Path, Path, Path, Path]:
        config = self.config
        if config.train_images is None:
            drawn = generate(cache_folder(config.cache_folder), config.generated)
            return drawn.train_images, drawn.train_annotations, drawn.val_images, drawn.val_annotations
        given = (config.train_images, config.train_annotations, config.val_images, config.val_annotations)
        train_images, train_annotations, val_images, val_annotations = (Path(str(p)).expanduser() for p in given)
        return train_images, train_annotations, val_images, val_annotations
