"""RetinaNet as a LightningModule: losses, optimizer and schedule, COCO scores, and pictures of what it finds."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fasttrain.hyperparameters import config_of
from fasttrain.recipes.retinanet.detections import Detections
from fasttrain.recipes.retinanet.metric import DETECTION_COLUMNS, available_scorer, score_boxes
from fasttrain.recipes.retinanet.model import RetinaNet, RetinaNetConfig
from fasttrain.recipes.retinanet.optimizer import OptimizerConfig, make_optimizer
from fasttrain.recipes.retinanet.pictures import contact_sheet, draw_detections
from fasttrain.recipes.retinanet.rows import DetectionRows
from fasttrain.trainer import optimizer_steps_per_epoch

Batch = Mapping[str, Tensor]
SAMPLES = 12
SAMPLE_SCORE = 0.3  # detections below it clutter a picture
PNG_LEVEL = 1  # the usual 6 takes 3.6 times as long for files four fifths as large


@dataclass(frozen=True)
class TrainingConfig:
    """The `module` section of a RetinaNet recipe."""

    model: RetinaNetConfig = field(default_factory=RetinaNetConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scores_per_category: bool = False
    """Log the `map` and `mar_100` of each category too, as `map/NAME`."""


class RetinaNetTraining(pl.LightningModule):
    """Trains and scores RetinaNet on batches of static shapes (see `dataset.collate`).

    Logs in training `loss`, `cls_loss`, `box_loss` and `lr`; in validation COCO's twelve numbers under
    `metric.NAMES`, of which `map` is the target's.
    """

    def __init__(self, config: TrainingConfig) -> None:
        super().__init__()
        self.config = config = config_of(TrainingConfig, config)
        self.save_hyperparameters({"config": asdict(config)})
        self.model = RetinaNet(config.model)
        self._ground_truth: Mapping[str, Any] | None = None
        self._rows = DetectionRows(config.model.image_size)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the summed loss. Nothing in here waits for the device but Lightning's logging."""
        losses = self.model.loss(self.model.forward_levels(batch["images"]), batch["boxes"], batch["labels"])
        loss = torch.stack(list(losses.values())).sum()
        self.log_dict({"loss": loss.detach(), **{name: value.detach() for name, value in losses.items()}})
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Detect, and keep the detections in pixels of the original images."""
        self._rows.add(self.evaluate_batch(batch), batch["image_id"], batch["original_size"])

    def evaluate_batch(self, batch: Batch) -> Detections:
        """Return what there is to keep of an evaluation's batch: the device's part, of weights and batch alone."""
        detections = self.model.detect(self.model.forward_levels(batch["images"]))
        # A sample whose image can't be used is blank: what is found in it is noise.
        return detections._replace(count=detections.count * (batch["bad_image_id"] < 0))

    def on_validation_epoch_end(self) -> None:
        """Score all detections by COCO's rules, on the first rank, and log the numbers on every rank."""
        rows = np.concatenate([np.zeros((0, DETECTION_COLUMNS)), *self.validation_rows()])
        if self.trainer.sanity_checking:
            return
        gathered = _gather(rows, self.trainer.world_size)
        scores: list[Any] = [None]
        if self.trainer.is_global_zero:
            scores = [self.score_function()(self.ground_truth(), gathered)]
        if self.trainer.world_size > 1:
            torch.distributed.broadcast_object_list(scores, src=0)
        # Tensors of the CPU: a float would be sent to the device for the logger to fetch it back.
        self.log_dict({name: torch.tensor(value, dtype=torch.float64) for name, value in scores[0].items()})

    def validation_rows(self) -> list[NDArray[np.float64]]:
        """Return this rank's detections since the last call, an array a batch (see `detection_rows`); forgets them."""
        return self._rows.take()

    def ground_truth(self) -> Mapping[str, Any]:
        """Return the validation set's COCO dict."""
        if self._ground_truth is None:
            data = self.trainer.datamodule  # type: ignore[attr-defined]
            self._ground_truth = data.ground_truth()
        assert self._ground_truth is not None
        return self._ground_truth

    def score_function(self) -> Callable[[Any, NDArray[np.float64]], dict[str, float]]:
        """Return what scores rows against the ground truth; another process can import it."""
        return partial(score_boxes, scorer=available_scorer(), per_category=self.config.scores_per_category)

    def configure_optimizers(self) -> Any:
        """Return Adam or AdamW over the trainable parameters, and the schedule by step."""
        steps_per_epoch = optimizer_steps_per_epoch(self.trainer)
        return make_optimizer(
            self.parameters(), self.config.optimizer, steps_per_epoch, self.trainer.estimated_stepping_batches
        )

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the learning rate: a host value, or the device's where the step is captured."""
        self.log("lr", torch.as_tensor(optimizer.param_groups[0]["lr"]))

    def draw_samples(self, data: pl.LightningDataModule, folder: Path) -> None:
        """Draw detections on images of the validation set: one PNG an image, and a contact sheet of them."""
        batch = {name: values[:SAMPLES] for name, values in next(iter(data.val_dataloader())).items()}
        self.eval()
        with torch.no_grad():
            detections = self.model.detect(self.model(batch["images"].to(self.device)))
        names = getattr(data, "class_names", ())
        pictures, images = [], batch["images"].cpu()
        for index in range(len(images)):
            boxes, scores, labels = (part[index].cpu() for part in detections[:3])
            good = scores >= SAMPLE_SCORE
            pictures.append(
                draw_detections(
                    images[index], boxes[good], labels[good], scores[good], names, batch["boxes"][index].cpu()
                )
            )
            pictures[-1].save(folder / f"detections-{index:02}.png", compress_level=PNG_LEVEL)
        contact_sheet(pictures).save(folder / "contact-sheet.png", compress_level=PNG_LEVEL)


def _gather(rows: NDArray[np.float64], world_size: int) -> NDArray[np.float64]:
    """Return the rows of all ranks in rank order; each image is evaluated by one rank only."""
    if world_size == 1:
        return rows
    parts: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(parts, rows)
    return np.concatenate(parts)
