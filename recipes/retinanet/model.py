"""The MLPerf RetinaNet as a plain module: images to raw predictions, raw predictions to losses or detections.

Lin et al., "Focal Loss for Dense Object Detection" (arXiv 1708.02002), as run in MLPerf Training v2.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fasttrain.errors import ConfigError
from fasttrain.recipes.retinanet.anchors import level_anchors
from fasttrain.recipes.retinanet.backbone import TRAINABLE_ORDER, build_backbone, check_levels
from fasttrain.recipes.retinanet.detections import Detections, detect
from fasttrain.recipes.retinanet.head import Head
from fasttrain.recipes.retinanet.loss import SigmoidFocalLoss, box_loss, class_of_anchor
from fasttrain.recipes.retinanet.matching import AnchorMatcher
from fasttrain.recipes.retinanet.pretrained import first_version_name, load_pretrained
from fasttrain.recipes.retinanet.suppression import ClassSuppression

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Shaped

# Statistics of ImageNet's training set, which torchvision's backbone weights are trained with.
IMAGE_MEAN = (0.485, 0.456, 0.406)
IMAGE_STD = (0.229, 0.224, 0.225)
COARSEST_STRIDE = 32
PRETRAINED_TRAINABLE_LAYERS = 3
AT_LEAST_ONE = (
    "num_classes",
    "fpn_channels",
    "head_depth",
    "scales_per_octave",
    "topk_candidates",
    "detections_per_image",
)


@dataclass(frozen=True)
class RetinaNetConfig:
    """What the model is; the defaults are those of MLPerf Training v2.0 (benchmark `ssd`) unless said otherwise."""

    num_classes: int = 264
    """Classes without background; MLPerf's OpenImages subset has 264."""
    backbone: str = "resnext50_32x4d"
    """One of `backbone.NAMES`: a residual network of torchvision, or `small` for CPUs."""
    image_size: tuple[int, int] = (800, 800)
    """Height and width of the images in pixels, multiples of 32."""
    norm: Literal["auto", "frozen", "batch"] = "auto"
    """Backbone normalisation: constants, or trained batch norm; auto is frozen with `weights`, as in torchvision."""
    weights: str | None = None
    """Local file with a torchvision backbone's or a whole torchvision RetinaNet's state dict; None starts at random."""
    trainable_layers: int | None = None
    """How many of conv1, layer1, ..., layer4 train, from the last; None is 3 with `weights` (MLPerf), else 5."""
    levels: tuple[int, ...] = (3, 4, 5, 6, 7)
    """Pyramid levels that predict; level l has stride 2**l pixels."""
    extra_levels_from: Literal["c5", "p5"] = "c5"
    """What P6 is computed from: MLPerf and the paper take C5, torchvision's COCO model of ResNet-50 takes P5."""
    fpn_channels: int = 256
    """Channels of the pyramid and of the heads."""
    head_depth: int = 4
    """Hidden convolutions of each head."""
    head_norm: Literal["none", "group"] = "none"
    """Normalisation in the heads; training from scratch learns little without (torchvision's v2 has `group`)."""
    anchor_sizes: tuple[int, ...] = (32, 64, 128, 256, 512)
    """Side in pixels of the smallest square anchor of each level."""
    scales_per_octave: int = 3
    """Anchor sizes per level, between one level's size and twice that."""
    aspect_ratios: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Heights over widths of the anchors."""
    foreground_iou: float = 0.5
    """An anchor with at least this IoU answers for the box."""
    background_iou: float = 0.4
    """An anchor with less than this IoU is background; in between it takes part in no loss."""
    focal_alpha: float = 0.25
    """Weight of the foreground in the focal loss."""
    focal_gamma: float = 2.0
    """Focusing exponent of the focal loss."""
    box_loss_weight: float = 1.0
    """Factor of the box loss in the sum."""
    score_threshold: float = 0.05
    """Detections have a greater score."""
    topk_candidates: int = 1000
    """Candidates per level that go into the non-maximum suppression."""
    nms_threshold: float = 0.5
    """Of two detections of a class with a greater IoU the better one stays."""
    detections_per_image: int = 300
    """Detections kept per image."""

    def __post_init__(self) -> None:
        """Judge the values; raises ConfigError."""
        check_levels(self.levels)
        if len(self.anchor_sizes) != len(self.levels):
            raise ConfigError(
                f"anchor_sizes={tuple(self.anchor_sizes)} has {len(self.anchor_sizes)} sizes for the "
                f"{len(self.levels)} levels {tuple(self.levels)}: one per level is needed, "
                f"such as {tuple(4 * 2**level for level in self.levels)}."
            )
        if any(side < COARSEST_STRIDE or side % COARSEST_STRIDE for side in self.image_size):
            nearest = tuple(COARSEST_STRIDE * max(1, round(side / COARSEST_STRIDE)) for side in self.image_size)
            raise ConfigError(
                f"image_size={tuple(self.image_size)} doesn't fit the pyramid: height and width are multiples of "
                f"{COARSEST_STRIDE}, the nearest is {nearest}."
            )
        if not 0 <= self.background_iou <= self.foreground_iou <= 1:
            raise ConfigError(
                f"background_iou={self.background_iou} and foreground_iou={self.foreground_iou} don't fit together: "
                "0 <= background_iou <= foreground_iou <= 1 is needed."
            )
        if self.trainable_layers is not None and not 0 <= self.trainable_layers <= len(TRAINABLE_ORDER):
            raise ConfigError(
                f"trainable_layers={self.trainable_layers} is out of range: 0 trains no layer of the backbone, "
                f"{len(TRAINABLE_ORDER)} all of them."
            )
        for name in AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is too small: it must be at least 1.")
        for name in ("anchor_sizes", "aspect_ratios"):
            values = tuple(getattr(self, name))
            if not values or min(values) <= 0:
                raise ConfigError(f"{name}={values} can't make anchors: numbers greater than 0 are needed.")


class RawPredictions(NamedTuple):
    """The heads' output for all anchors of a batch."""

    cls_logits: Float[Tensor, "B A K"]
    box_deltas: Float[Tensor, "B A 4"]


class RetinaNet(nn.Module):
    """The detector; parameter names and shapes are those of torchvision's RetinaNet.

    Attributes:
        anchors: float32 (A, 4) xyxy in pixels of the configured image size; a buffer that no checkpoint holds.
        anchors_per_level: how many of them belong to each level, finest first.
    """

    anchors: Tensor
    image_mean: Tensor
    image_std: Tensor

    def __init__(self, config: RetinaNetConfig):
        """Build the model at random, then load `config.weights` if given.

        Raises:
            ConfigError: an unknown backbone, impossible levels, or a weights file that can't be read or doesn't fit.
        """
        super().__init__()
        self.config = config
        pretrained = config.weights is not None
        default_layers = PRETRAINED_TRAINABLE_LAYERS if pretrained else len(TRAINABLE_ORDER)
        self.backbone = build_backbone(
            config.backbone,
            config.levels,
            config.fpn_channels,
            frozen_norm=config.norm == "frozen" or (config.norm == "auto" and pretrained),
            trainable_layers=default_layers if config.trainable_layers is None else config.trainable_layers,
            extra_levels_from=config.extra_levels_from,
        )
        anchors_per_cell = config.scales_per_octave * len(config.aspect_ratios)
        self.head = Head(
            config.fpn_channels, config.head_depth, config.head_norm == "group", anchors_per_cell, config.num_classes
        )
        self.matcher = AnchorMatcher(config.foreground_iou, config.background_iou)
        self.focal_loss = SigmoidFocalLoss(config.focal_alpha, config.focal_gamma)
        self.suppression = ClassSuppression(config.nms_threshold, config.detections_per_image)
        anchors = level_anchors(
            config.image_size, config.levels, config.anchor_sizes, config.scales_per_octave, config.aspect_ratios
        )
        self.anchors_per_level = [len(level) for level in anchors]
        self.register_buffer("anchors", torch.cat(anchors), persistent=False)
        self.register_buffer("image_mean", torch.tensor(IMAGE_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("image_std", torch.tensor(IMAGE_STD).view(3, 1, 1), persistent=False)
        if config.weights is not None:
            load_pretrained(self, config.weights)

    def forward(self, images: Shaped[Tensor, "B 3 H W"]) -> RawPredictions:
        """Return the predictions of all levels, finest first, in the order of `anchors`.

        Args:
            images: RGB, uint8 or float in [0, 1], not normalised.

        Raises:
            ConfigError: the images don't have the configured size.
        """
        levels = self.forward_levels(images)
        return RawPredictions(
            torch.cat([level.cls_logits for level in levels], dim=1),
            torch.cat([level.box_deltas for level in levels], dim=1),
        )

    def forward_levels(self, images: Shaped[Tensor, "B 3 H W"]) -> list[RawPredictions]:
        """Return the predictions of each level by itself, as `forward` but for the copy into one tensor."""
        if tuple(images.shape[-2:]) != tuple(self.config.image_size):
            raise ConfigError(
                f"The model is built for images of {_size(self.config.image_size)} and got {_size(images.shape[-2:])}: "
                "resize the data to the model's image_size, or set image_size to that of the data."
            )
        return [RawPredictions(*self.head(feature)) for feature in self.backbone(self.normalise(images))]

    def normalise(self, images: Shaped[Tensor, "B 3 H W"]) -> Float[Tensor, "B 3 H W"]:
        """Return images, uint8 or float in [0, 1], less ImageNet's mean, over its standard deviation."""
        # Two passes: a division that reads the bytes, and a multiplication with an addition.
        scaled = images if images.is_floating_point() else (images / 255).to(self.image_mean.dtype)
        return torch.addcmul(-self.image_mean / self.image_std, scaled, 1 / self.image_std)

    def loss(
        self,
        predictions: RawPredictions | Sequence[RawPredictions],
        boxes: Float[Tensor, "B M 4"],
        labels: Int[Tensor, "B M"],
        matched: Int[Tensor, "B A"] | None = None,
    ) -> dict[str, Tensor]:
        """Return float32 scalars `cls_loss` and `box_loss` (times its weight), whose sum is the loss to minimise.

        Shapes are static and nothing waits for the device, so that a step can be captured.

        Args:
            predictions: from `forward` or, which saves a focal loss that takes levels a copy, `forward_levels`.
            boxes: ground truth, xyxy in pixels of the resized image, padded.
            labels: class indices, -1 for padding.
            matched: `matching.match` of these boxes, if it is done elsewhere.
        """
        config = self.config
        if matched is None:
            matched = self.matcher(self.anchors, boxes, labels)
        levels = [predictions] if isinstance(predictions, RawPredictions) else predictions
        deltas = torch.cat([level.box_deltas for level in levels], dim=1)
        return {
            "cls_loss": self.focal_loss([level.cls_logits for level in levels], class_of_anchor(labels, matched)),
            "box_loss": config.box_loss_weight * box_loss(deltas, self.anchors, boxes, matched),
        }

    def detect(self, predictions: RawPredictions | Sequence[RawPredictions]) -> Detections:
        """Return the detections in pixels of the resized images, see `detections.detect`.

        Args:
            predictions: from `forward` or, which saves a copy of all logits, `forward_levels`.
        """
        config = self.config
        levels = [predictions] if isinstance(predictions, RawPredictions) else predictions
        return detect(
            levels[0].cls_logits if levels is not predictions else [level.cls_logits for level in levels],
            torch.cat([level.box_deltas for level in levels], dim=1),
            self.anchors,
            self.anchors_per_level,
            config.image_size,
            config.score_threshold,
            config.topk_candidates,
            config.nms_threshold,
            config.detections_per_image,
            self.suppression,
        )

    def logged_tensors(self) -> list[str]:
        """Return the names under which an MLPerf log reports the initialised weights; 89 for the MLPerf model.

        All parameters, trained or not: frozen batch norm has none. The names are those of the wrapped reference model
        of v2.0, whose torchvision numbered convolutions without their own containers
        (`conv.2.weight` for `conv.1.0.weight`); the compliance checker compares them literally.
        """
        return ["module." + first_version_name(name) for name, _ in self.named_parameters()]


def _size(shape: tuple[int, ...] | torch.Size) -> str:
    return f"{shape[0]} x {shape[1]}"
