"""ResNet classification as a LightningModule: loss, optimizer and schedule, and an exact top-1 over all processes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor

from fasttrain.errors import ConfigError
from fasttrain.hyperparameters import config_of
from fasttrain.recipes.resnet50.cadence import EvaluationCadence
from fasttrain.recipes.resnet50.model import ResNetConfig, build_model
from fasttrain.recipes.resnet50.optimizer import OptimizerConfig, make_optimizer
from fasttrain.recipes.resnet50.statistics import average_running_statistics, share_statistics
from fasttrain.trainer import optimizer_steps_per_epoch

Batch = Mapping[str, Tensor]
# torchvision's and NVIDIA's, of pixels in 0..1
IMAGE_MEAN = (0.485, 0.456, 0.406)
IMAGE_STD = (0.229, 0.224, 0.225)
TOP = 5


@dataclass(frozen=True)
class TrainingConfig:
    """The `module` section of a ResNet recipe."""

    model: ResNetConfig = field(default_factory=ResNetConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    label_smoothing: float = 0.1
    """Part of the target that all classes share in training; MLPerf allows 0 and 0.1."""
    ema_decay: float | None = None
    """Score and keep weights averaged with this decay a step, by Lightning's EMAWeightAveraging; null for none."""
    evaluation_offset: int = 2
    """After which epoch of every `trainer.check_val_every_n_epoch` the run is evaluated, counted from 0; NVIDIA's in
    MLPerf v2.0. The last epoch always is."""

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(f"module.label_smoothing is {self.label_smoothing}; it must be from 0 to less than 1.")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ConfigError(f"module.ema_decay is {self.ema_decay}; it must be between 0 and 1, or null for none.")
        if self.evaluation_offset < 0:
            raise ConfigError(f"module.evaluation_offset is {self.evaluation_offset}; it must be at least 0.")


class ResNetTraining(pl.LightningModule):
    """Trains and scores a ResNet on batches of static shapes (see `dataset.ClassificationDataset`).

    Logs in training `loss` and `lr`; in validation `top1`, `top5` (of fewer classes, top as many as there are but one)
    and `val_loss`, over all images of all processes, each counted once.
    """

    image_mean: Tensor
    image_std: Tensor

    def __init__(self, config: TrainingConfig) -> None:
        super().__init__()
        self.config = config = config_of(TrainingConfig, config)
        self.save_hyperparameters({"config": asdict(config)})
        self.model = build_model(config.model)
        self.register_buffer("image_mean", 255 * torch.tensor(IMAGE_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("image_std", 255 * torch.tensor(IMAGE_STD).view(3, 1, 1), persistent=False)
        self._counts: list[Tensor] = []
        self._losses: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, classes) of uint8 RGB images (B, 3, H, W)."""
        logits: Tensor = self.model(self.normalise(images))
        return logits

    def normalise(self, images: Tensor) -> Tensor:
        """Return uint8 images as floats less ImageNet's mean, over its standard deviation."""
        return (images - self.image_mean) / self.image_std

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean cross-entropy. Nothing in here waits for the device but Lightning's logging."""
        images, labels, smoothing = self.normalise(batch["images"]), batch["labels"], self.config.label_smoothing
        if "mix" not in batch:
            loss = F.cross_entropy(self.model(images), labels, label_smoothing=smoothing)
        else:
            own = batch["mix"]
            share = own.view(-1, 1, 1, 1)
            logits = self.model(share * images + (1 - share) * images.flip(0))
            losses = [
                F.cross_entropy(logits, target, label_smoothing=smoothing, reduction="none")
                for target in (labels, labels.flip(0))
            ]
            loss = (own * losses[0] + (1 - own) * losses[1]).mean()
        self.log("loss", loss.detach())
        return loss

    def setup(self, stage: str) -> None:
        """Make the groups that share batch statistics."""
        if stage == "fit":
            share_statistics(self.model, self.config.model.sync_bn, self.trainer.world_size, self.device)

    def on_validation_epoch_start(self) -> None:
        """Have all processes evaluate with the same statistics, and count from 0."""
        average_running_statistics(self.model, self.trainer.world_size)
        self._counts.clear()
        self._losses.clear()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Count, on the device. Labels below 0 are of no image; an unreadable image counts as missed."""
        logits, labels = self(batch["images"]).float(), batch["labels"]
        good = batch["bad_image_id"] < 0
        ranked = logits.topk(min(TOP, max(1, logits.shape[1] - 1)), dim=1).indices == labels[:, None]
        found = (ranked[:, 0] & good, ranked.any(dim=1) & good, labels >= 0)
        self._counts.append(torch.stack([each.sum() for each in found]))
        self._losses.append(F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum"))

    def on_validation_epoch_end(self) -> None:
        """Log the scores of all images, on every process."""
        counts, loss = torch.stack(self._counts).sum(0), torch.stack(self._losses).sum()
        if self.trainer.world_size > 1:
            dist.all_reduce(counts)
            dist.all_reduce(loss)
        top1, top5, images = counts.tolist()
        scores = {"top1": top1 / images, "top5": top5 / images, "val_loss": loss.item() / images}
        # Tensors of the CPU: a float would be sent to the device for the logger to fetch it back.
        self.log_dict({name: torch.tensor(value, dtype=torch.float64) for name, value in scores.items()})

    def configure_optimizers(self) -> Any:
        """Return LARS or SGD, and the schedule by step."""
        trainer = self._trainer
        if trainer is None:  # someone who only wants to know or time the optimizer
            return make_optimizer(self.model, self.config.optimizer, 1, 1, 1)
        return make_optimizer(
            self.model,
            self.config.optimizer,
            optimizer_steps_per_epoch(trainer),
            trainer.estimated_stepping_batches,
            trainer.world_size * trainer.accumulate_grad_batches,
        )

    def configure_callbacks(self) -> list[pl.Callback]:
        """Return the callbacks that evaluate in time and average the weights."""
        callbacks: list[pl.Callback] = [EvaluationCadence(self.config.evaluation_offset)]
        if self.config.ema_decay is not None:
            callbacks.append(EMAWeightAveraging(decay=self.config.ema_decay))
        return callbacks

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the learning rate: a host value, or the device's where the step is captured."""
        self.log("lr", torch.as_tensor(optimizer.param_groups[0]["lr"]))
