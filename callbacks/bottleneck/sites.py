"""Where a model has stages of frozen bottleneck blocks: torchvision's ResNet, ResNeXt, Wide ResNet and detectors."""

from collections import Counter
from functools import partial
from typing import Any

from torch import nn
from torchvision.models.resnet import Bottleneck

from fasttrain.callbacks.bottleneck.stage import PATH, FusedStage
from fasttrain.callbacks.folded_norm import why_not_frozen
from fasttrain.patches import ModulePatches, PatchSite, PatchSurgery
from fasttrain.surgery import joined, why_not_passed_by


class BottleneckPatches(ModulePatches):
    """The sites: every nn.Sequential of frozen Bottlenecks.

    Args:
        side_streams: see `FusedStage`.
    """

    room = "bottleneck"

    def __init__(self, side_streams: int = 1) -> None:
        self.side_streams = side_streams

    def sites(self, model: nn.Module) -> list[PatchSite]:
        """Return the stages that are not fused yet. A model that is itself a stage has no path, and is no site."""
        return [
            PatchSite(joined(path, name), child, partial(self._fused, child), calls_no_child=True)
            for path, parent in model.named_modules()
            for name, child in parent._modules.items()
            if child is not None and why_not_fused(child) is None
        ]

    def why_no_site(self, model: nn.Module) -> str:
        """Count the model's stages by what keeps them from being fused."""
        name = type(model).__name__
        counted = Counter(reason for module in model.modules() if (reason := why_not_fused(module)))
        if counted:
            texts = ", ".join(f"{count} with {reason}" for reason, count in counted.most_common())
            return f"{name} has no stage of frozen bottleneck blocks; of its nn.Sequentials of Bottlenecks, {texts}"
        blocks = sum(isinstance(module, Bottleneck) for module in model.modules())
        if blocks:
            return f"{name} has {blocks} Bottlenecks, and no nn.Sequential of nothing but torchvision's own"
        return f"{name} has no nn.Sequential of torchvision's Bottlenecks"

    def _fused(self, stage: nn.Module) -> FusedStage:
        fused = fused_stage(stage)
        fused.side_streams = self.side_streams
        return fused


class BottleneckSurgery(PatchSurgery):
    """Puts a FusedStage to every site of a model, and the old stages back. The state dict stays as it is."""

    def __init__(self, model: nn.Module, side_streams: int = 1) -> None:
        super().__init__(model, BottleneckPatches(side_streams))


def fused_stage(stage: nn.Module) -> FusedStage:
    """Return a FusedStage of the children of an nn.Sequential, with its attributes, hooks and their names."""
    fused = FusedStage()
    own = {name: value for name, value in vars(fused).items() if name not in vars(stage)}
    vars(fused).update(vars(stage))
    vars(fused).update(own)
    return fused


def why_not_fused(module: nn.Module) -> str | None:
    """Return what a stage has that can't be fused, None if there is nothing, '' for a module that is no stage."""
    if type(module) is not nn.Sequential or not len(module):
        return ""
    if not all(type(block) is Bottleneck for block in module):
        return ""
    if "forward" in vars(module):
        return "a forward that was patched"
    for block in module:
        if reason := _why_not_a_block(block):
            return reason
    return None


def _why_not_a_block(block: Any) -> str | None:
    pairs = [(getattr(block, conv), getattr(block, norm)) for conv, norm in PATH]
    downsample = block.downsample
    if downsample is not None:
        if type(downsample) is not nn.Sequential or len(downsample) != 2:
            return "a downsample path that is not one convolution and its normalization"
        pairs.append((downsample[0], downsample[1]))
    if type(block.relu) is not nn.ReLU:
        return f"{type(block.relu).__name__} in place of ReLU"
    for conv, norm in pairs:
        if (reason := why_not_frozen(norm)) is not None:
            return f"a normalization {reason}" if reason else f"{type(norm).__name__} as its normalization"
        if type(conv) is not nn.Conv2d:
            return f"{type(conv).__name__} as a convolution"
        if conv.bias is not None:
            return "a convolution that has a bias"
        if conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            return f"a convolution padded with {conv.padding if conv.padding_mode == 'zeros' else conv.padding_mode}"
    ones = [block.conv1, block.conv3, *(downsample or [])[:1]]
    if any(conv.kernel_size != (1, 1) or conv.padding != (0, 0) or conv.groups != 1 for conv in ones):
        return "a first, last or downsampling convolution that is not a plain 1x1"
    if block.conv1.stride != (1, 1) or block.conv3.stride != (1, 1) or (downsample and len(set(ones[-1].stride)) > 1):
        return "a stride elsewhere than in the convolution in the middle"
    watched = [block, *(module for module in block.modules() if why_not_passed_by(module) is not None)]
    return f"a {type(watched[-1]).__name__} {why_not_passed_by(watched[-1])}" if watched[1:] else None
