"""The two heads, shared by all levels, under torchvision's parameter names.

Lin et al. (arXiv 1708.02002), section 4: convolutions with ReLU, then one that predicts for every anchor of a cell.
"""

import math
from collections.abc import Callable

from torch import Tensor, nn
from torchvision.ops.misc import Conv2dNormActivation

# Every anchor starts as foreground with this probability (section 4.1): else background swamps the first losses.
PRIOR_PROBABILITY = 0.01
# torchvision's retinanet_resnet50_fpn_v2 takes 32 groups of 256 channels.
MAX_NORM_GROUPS = 32


class ClassificationHead(nn.Module):
    """Class logits of one level."""

    def __init__(self, channels: int, depth: int, group_norm: bool, anchors_per_cell: int, num_classes: int):
        super().__init__()
        self.num_classes = num_classes
        self.conv = _tower(channels, depth, group_norm)
        self.cls_logits = nn.Conv2d(channels, anchors_per_cell * num_classes, 3, padding=1)
        _initialise(self)
        nn.init.constant_(self.cls_logits.bias, -math.log((1 - PRIOR_PROBABILITY) / PRIOR_PROBABILITY))  # type: ignore[arg-type]

    def forward(self, feature: Tensor) -> Tensor:
        """Return (B, h * w * anchors_per_cell, num_classes) for a feature map (B, channels, h, w)."""
        return _per_anchor(self.cls_logits(self.conv(feature)), self.num_classes)


class RegressionHead(nn.Module):
    """Box deltas of one level."""

    def __init__(self, channels: int, depth: int, group_norm: bool, anchors_per_cell: int):
        super().__init__()
        self.conv = _tower(channels, depth, group_norm)
        self.bbox_reg = nn.Conv2d(channels, anchors_per_cell * 4, 3, padding=1)
        _initialise(self)

    def forward(self, feature: Tensor) -> Tensor:
        """Return (B, h * w * anchors_per_cell, 4) for a feature map (B, channels, h, w)."""
        return _per_anchor(self.bbox_reg(self.conv(feature)), 4)


class Head(nn.Module):
    """Both heads."""

    def __init__(self, channels: int, depth: int, group_norm: bool, anchors_per_cell: int, num_classes: int):
        super().__init__()
        self.classification_head = ClassificationHead(channels, depth, group_norm, anchors_per_cell, num_classes)
        self.regression_head = RegressionHead(channels, depth, group_norm, anchors_per_cell)

    def forward(self, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Return one level's class logits and box deltas, anchors in the order of `anchors.level_anchors`."""
        return self.classification_head(feature), self.regression_head(feature)


def _tower(channels: int, depth: int, group_norm: bool) -> nn.Sequential:
    norm: Callable[[int], nn.Module] | None = _group_norm if group_norm else None
    return nn.Sequential(*(Conv2dNormActivation(channels, channels, norm_layer=norm) for _ in range(depth)))


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(math.gcd(MAX_NORM_GROUPS, channels), channels)


def _initialise(head: nn.Module) -> None:
    for module in head.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.normal_(module.weight, std=0.01)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def _per_anchor(x: Tensor, values: int) -> Tensor:
    """(B, anchors_per_cell * values, h, w) to (B, h * w * anchors_per_cell, values); free if x is channels_last."""
    return x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, values)
