"""The peer that ours is compared with: torchvision's RetinaNet in plain Lightning, as its user would write it.

The same architecture, images, optimizer and schedule; torchvision's own transform, losses and post-processing; images
of their own sizes decoded by Pillow in worker processes and handed over as lists.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from pycocotools.coco import COCO
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.models import resnext50_32x4d
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.backbone_utils import _resnet_fpn_extractor
from torchvision.ops import FrozenBatchNorm2d
from torchvision.ops.feature_pyramid_network import LastLevelP6P7
from torchvision.transforms.functional import hflip, to_tensor

from fasttrain.recipes.retinanet.metric import score_boxes
from fasttrain.recipes.retinanet.optimizer import OptimizerConfig, make_optimizer

Sample = tuple[Tensor, dict[str, Tensor]]


class PlainCoco(Dataset[Sample]):
    """Images of a COCO folder at their own size, and torchvision's targets in the image's own pixels."""

    def __init__(self, images: Path, annotations: Path, flip: bool) -> None:
        self.coco, self.folder, self.flip = COCO(str(annotations)), images, flip
        self.ids = sorted(self.coco.imgs)
        self.label_of = {category: index for index, category in enumerate(sorted(self.coco.cats))}

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Sample:
        record = self.coco.imgs[self.ids[index]]
        image = to_tensor(Image.open(self.folder / record["file_name"]).convert("RGB"))
        found = [a for a in self.coco.imgToAnns[record["id"]] if not a.get("iscrowd")]
        boxes = torch.tensor([a["bbox"] for a in found], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        if self.flip and torch.rand(()) < 0.5:
            image = hflip(image)
            boxes[:, [0, 2]] = image.shape[-1] - boxes[:, [2, 0]]
        labels = torch.tensor([self.label_of[a["category_id"]] for a in found], dtype=torch.int64)
        return image, {"boxes": boxes, "labels": labels, "image_id": torch.tensor(record["id"])}


class TorchvisionRetinaNet(pl.LightningModule):
    """torchvision's RetinaNet on ResNeXt-50 32x4d with P6 from C5.

    Args:
        truth: of the validation set; its categories are the classes.
        image_size: height and width that torchvision's transform resizes to.
        optimizer: and schedule.
        weights: file of a pretrained backbone. With it batch norm is constants and conv1 and layer1 do not train, as in
            MLPerf; with none everything trains.
    """

    def __init__(
        self, truth: COCO, image_size: tuple[int, int], optimizer: OptimizerConfig, weights: str | None = None
    ) -> None:
        super().__init__()
        self.truth, self.optimizer_config = truth, optimizer
        body = resnext50_32x4d(weights=None, norm_layer=FrozenBatchNorm2d if weights else None)
        if weights:
            body.load_state_dict(torch.load(weights, weights_only=True))
        layers, extra = (3 if weights else 5), LastLevelP6P7(2048, 256)
        backbone = _resnet_fpn_extractor(body, layers, returned_layers=[2, 3, 4], extra_blocks=extra)
        self.model = RetinaNet(backbone, len(truth.cats), fixed_size=image_size)
        self.category_of = sorted(truth.cats)
        self.rows: list[NDArray[np.float64]] = []
        self.score: dict[str, float] = {}

    def training_step(self, batch: tuple[Sequence[Tensor], Sequence[dict[str, Tensor]]], batch_idx: int) -> Tensor:
        """Return torchvision's summed loss."""
        images, targets = batch
        losses = self.model(list(images), list(targets))
        loss = torch.stack(list(losses.values())).sum()
        self.log("loss", loss, batch_size=len(images))
        return loss

    def validation_step(self, batch: tuple[Sequence[Tensor], Sequence[dict[str, Tensor]]], batch_idx: int) -> None:
        """Keep torchvision's detections as COCO rows."""
        images, targets = batch
        for found, target in zip(self.model(list(images)), targets, strict=True):
            boxes = found["boxes"].double().cpu().numpy()
            categories = np.array([self.category_of[i] for i in found["labels"].tolist()], dtype=np.float64)
            image_id = np.full(len(boxes), float(target["image_id"]))
            size = boxes[:, 2:] - boxes[:, :2]
            self.rows.append(
                np.column_stack([image_id, boxes[:, :2], size, found["scores"].double().cpu().numpy(), categories])
            )

    def on_validation_epoch_end(self) -> None:
        """Score with the same scorer as ours."""
        self.score = score_boxes(self.truth.dataset, np.concatenate(self.rows))
        self.rows.clear()
        self.log("map", self.score["map"])

    def configure_optimizers(self) -> Any:
        """Return the optimizer and schedule that ours uses."""
        total = self.trainer.estimated_stepping_batches
        return make_optimizer(self.parameters(), self.optimizer_config, self.trainer.num_training_batches, total)


def plain_loader(dataset: PlainCoco, batch_size: int, train: bool, workers: int) -> DataLoader[Sample]:
    """Return torch's loader as detection scripts make it."""
    return DataLoader(
        dataset, batch_size, shuffle=train, drop_last=train, num_workers=workers, collate_fn=_lists,
        pin_memory=True, persistent_workers=workers > 0,
    )  # fmt: skip


def _lists(samples: Sequence[Sample]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)
