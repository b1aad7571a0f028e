"""A backbone whose frozen statistics are those of its own maps, as a pretrained one's are, without a download.

With statistics of nothing a random ResNeXt's maps grow from block to block, out of half precision's range in the end;
and what a GPU's matrix units draw in power, and so their clock, depends on the values.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.models import resnext50_32x4d
from torchvision.transforms.functional import pil_to_tensor

from fasttrain.recipes.retinanet.model import IMAGE_MEAN, IMAGE_STD

SIDE = 224


def backbone_file(pictures: Sequence[Path], side: int = SIDE) -> Path:
    """Return a state dict of torchvision's ResNeXt-50 32x4d beside the pictures, made unless it lies there.

    Args:
        pictures: whose maps' means and variances become the normalizations'.
        side: in pixels that they are resized to.
    """
    file = pictures[0].parent / f"resnext50-{len(pictures)}-{side}.pt"
    if not file.exists():
        unfinished = file.with_name(f".{file.name}-{os.getpid()}")
        torch.save(random_backbone(pictures, side).state_dict(), unfinished)
        unfinished.replace(file)
    return file


@torch.no_grad()
def random_backbone(pictures: Sequence[Path], side: int) -> nn.Module:
    """Return a random network, the same at every call, after one forward of all pictures in training mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network: nn.Module = resnext50_32x4d(weights=None)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the mean over all forwards, of which there is one
    network.train()(normalised(pictures, side))
    return network.eval()


def normalised(pictures: Sequence[Path], side: int) -> Tensor:
    """Return pictures as the network takes them, float32 (B, 3, side, side)."""
    images = [pil_to_tensor(Image.open(file).convert("RGB").resize((side, side))) for file in pictures]
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGE_MEAN, IMAGE_STD))
    return (torch.stack(images) / 255 - mean) / std
