"""Backbones by name with a feature pyramid on top, under torchvision's parameter names (`body.*`, `fpn.*`).

He et al., "Deep Residual Learning" (arXiv 1512.03385), Xie et al., "Aggregated Residual Transformations" (1611.05431),
Lin et al., "Feature Pyramid Networks" (1612.03144). The residual networks and the pyramid are torchvision's.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import resnet
from torchvision.ops import FeaturePyramidNetwork, FrozenBatchNorm2d
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

from fasttrain.errors import ConfigError, nearest

SMALL = "small"
SMALL_WIDTHS = (32, 64, 128, 192)
TORCHVISION = (
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnext50_32x4d",
    "resnext101_32x8d",
    "resnext101_64x4d",
    "wide_resnet50_2",
    "wide_resnet101_2",
)
NAMES = (SMALL, *TORCHVISION)
TRAINABLE_ORDER = ("layer4", "layer3", "layer2", "layer1", "conv1")

Norm = Callable[[int], nn.Module]


class Body(nn.Module):
    """A residual network up to its last needed stage; gives the feature maps of the pyramid levels asked for.

    Stage `layer{l-1}` has stride 2**l, so it is level l. Parameter names are those of torchvision's classifiers.
    """

    def __init__(self, parts: dict[str, nn.Module], levels: Sequence[int]):
        """Take the stem and the four stages by name, in the order in which they run."""
        super().__init__()
        self.returned = {f"layer{level - 1}": str(level) for level in levels}
        for name, part in parts.items():
            self.add_module(name, part)
            if name == f"layer{max(levels) - 1}":
                break

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return one feature map per level, keyed by the level, finest first."""
        x = images
        features = {}
        for name, part in self.named_children():
            x = part(x)
            if name in self.returned:
                features[self.returned[name]] = x
        return features

    def freeze_all_but(self, trainable_layers: int) -> None:
        """Stop the gradients of all but the last `trainable_layers` of conv1, layer1, ..., layer4 (0 to 5).

        The first normalisation trains only with all five, as in torchvision.
        """
        trained = TRAINABLE_ORDER[:trainable_layers] + (("bn1",) if trainable_layers == len(TRAINABLE_ORDER) else ())
        for name, parameter in self.named_parameters():
            if name.partition(".")[0] not in trained:
                parameter.requires_grad_(False)


class TopDown(FeaturePyramidNetwork):  # type: ignore[misc]
    """torchvision's pyramid, whose maps stay in the dtype of their convolutions.

    Under autocast torchvision's `interpolate` gives float32 maps: twice the bytes, and a conversion at either end.
    """

    def forward(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return one map per level, and those of the extra levels, finest first."""
        names, maps = list(x), list(x.values())
        inner = self.get_result_from_inner_blocks(maps[-1], -1)
        results = [self.get_result_from_layer_blocks(inner, -1)]
        for index in range(len(maps) - 2, -1, -1):
            inner = add_enlarged(self.get_result_from_inner_blocks(maps[index], index), inner)
            results.insert(0, self.get_result_from_layer_blocks(inner, index))
        if self.extra_blocks is not None:
            results, names = self.extra_blocks(results, maps, names)
        return dict(zip(names, results, strict=True))


def add_enlarged(fine: Tensor, coarse: Tensor) -> Tensor:
    """Return `fine` (B, C, H, W) plus `coarse`, enlarged to its size by the nearest neighbour."""
    kind = fine.device.type
    # The meta device, on which work is counted, knows no autocast.
    with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
        return fine + F.interpolate(coarse, size=fine.shape[-2:], mode="nearest")


class FeaturePyramid(nn.Module):
    """A body and its feature pyramid; gives one map of `out_channels` per level."""

    def __init__(self, body: Body, fpn: nn.Module, out_channels: int):
        super().__init__()
        self.body = body
        self.fpn = fpn
        self.out_channels = out_channels

    def forward(self, images: Tensor) -> list[Tensor]:
        """Return the maps (B, out_channels, h, w) of the levels, finest first; images are normalised (B, 3, H, W)."""
        return list(self.fpn(self.body(images)).values())


def build_backbone(
    name: str,
    levels: Sequence[int],
    fpn_channels: int,
    frozen_norm: bool,
    trainable_layers: int,
    extra_levels_from: str = "c5",
) -> FeaturePyramid:
    """Return a randomly initialised backbone with its pyramid.

    Args:
        name: one of NAMES.
        levels: consecutive pyramid levels between 2 and 5, then optionally 6 and 7 together, which need level 5.
        fpn_channels: channels of every map.
        frozen_norm: statistics and affine parameters of the normalisation are constants (FrozenBatchNorm2d).
        trainable_layers: see `Body.freeze_all_but`.
        extra_levels_from: "c5" or "p5", the map that P6 is made of.

    Raises:
        ConfigError: no such backbone, or levels that the pyramid can't have.
    """
    check_levels(levels)
    body_levels = [level for level in levels if level <= 5]
    norm: Norm = FrozenBatchNorm2d if frozen_norm else nn.BatchNorm2d
    body, widths = _small_body(norm, body_levels) if name == SMALL else _torchvision_body(name, norm, body_levels)
    body.freeze_all_but(trainable_layers)
    extra = None
    if 7 in levels:
        extra = LastLevelP6P7(fpn_channels if extra_levels_from == "p5" else widths[5], fpn_channels)
    fpn = TopDown([widths[level] for level in body_levels], fpn_channels, extra_blocks=extra)
    return FeaturePyramid(body, fpn, fpn_channels)


def check_levels(levels: Sequence[int]) -> None:
    """Raise ConfigError unless the levels are consecutive, from 2 upwards, and end at most at 5, or at 7."""
    consecutive = list(levels) == list(range(levels[0], levels[0] + len(levels))) if levels else False
    if not consecutive or levels[0] < 2 or levels[0] > 5 or levels[-1] not in (2, 3, 4, 5, 7):
        raise ConfigError(
            f"levels={tuple(levels)} can't be built: levels are consecutive, the first from 2 to 5, the last up to 5, "
            "or 7 (6 and 7 come together), such as (3, 4, 5, 6, 7) or (3, 4, 5)."
        )


def _torchvision_body(name: str, norm: Norm, levels: Sequence[int]) -> tuple[Body, dict[int, int]]:
    if name not in TORCHVISION:
        raise ConfigError(f"There is no backbone '{name}'; {nearest(name, NAMES)}")
    net: nn.Module = getattr(resnet, name)(weights=None, norm_layer=norm)
    parts = {part: module for part, module in net.named_children() if part not in ("avgpool", "fc")}
    last_width = int(net.fc.in_features)  # type: ignore[union-attr, arg-type]
    return Body(parts, levels), {level: last_width // 2 ** (5 - level) for level in range(2, 6)}


def _small_body(norm: Norm, levels: Sequence[int]) -> tuple[Body, dict[int, int]]:
    """Four stages of one basic block each, for images of about 100 pixels on a CPU."""
    width_in = SMALL_WIDTHS[0]
    parts: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(3, width_in, 3, stride=2, padding=1, bias=False),
        "bn1": norm(width_in),
        "relu": nn.ReLU(inplace=True),
    }
    for stage, width in enumerate(SMALL_WIDTHS, start=1):
        shortcut = nn.Sequential(nn.Conv2d(width_in, width, 1, stride=2, bias=False), norm(width))
        block = resnet.BasicBlock(width_in, width, stride=2, downsample=shortcut, norm_layer=norm)
        parts[f"layer{stage}"] = nn.Sequential(block)
        width_in = width
    body = Body(parts, levels)
    for module in body.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return body, dict(enumerate(SMALL_WIDTHS, start=2))
