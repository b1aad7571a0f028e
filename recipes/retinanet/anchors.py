"""The anchors of an image size: a constant of the model, so they are made once and never inside a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float

OCTAVE = 2.0


def octave_sizes(base: int, scales_per_octave: int) -> tuple[int, ...]:
    """Return anchor sizes in pixels spread evenly over one octave, rounded down as torchvision's RetinaNet does."""
    return tuple(int(base * OCTAVE ** (i / scales_per_octave)) for i in range(scales_per_octave))


def feature_shapes(image_size: tuple[int, int], levels: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return (height, width) of each pyramid level; level l has stride 2**l and its stride-2 layers round up."""
    return tuple((-(-image_size[0] // 2**level), -(-image_size[1] // 2**level)) for level in levels)


def cell_anchors(sizes: Sequence[int], aspect_ratios: Sequence[float]) -> Float[Tensor, "cell 4"]:
    """Return the anchors around (0, 0): every aspect ratio (height / width) in turn, with every size of equal area."""
    height_ratio = torch.tensor(aspect_ratios, dtype=torch.float32).sqrt()
    size = torch.tensor(sizes, dtype=torch.float32)
    widths = torch.outer(1 / height_ratio, size).flatten()
    heights = torch.outer(height_ratio, size).flatten()
    return (torch.stack([-widths, -heights, widths, heights], dim=1) / 2).round()


def level_anchors(
    image_size: tuple[int, int],
    levels: Sequence[int],
    anchor_sizes: Sequence[int],
    scales_per_octave: int,
    aspect_ratios: Sequence[float],
) -> list[Float[Tensor, "anchor 4"]]:
    """Return the float32 xyxy anchors of each level in pixels, row by row, all of a cell's anchors together.

    The same numbers in the same order as torchvision's AnchorGenerator. Like there, the spacing of a level is the image
    size divided by its feature size and rounded down, which is 61 and not 64 pixels for P6 at 800.
    """
    anchors = []
    for (rows, columns), base in zip(feature_shapes(image_size, levels), anchor_sizes, strict=True):
        y = torch.arange(rows) * (image_size[0] // rows)
        x = torch.arange(columns) * (image_size[1] // columns)
        row, column = torch.meshgrid(y, x, indexing="ij")
        centres = torch.stack([column, row, column, row], dim=-1).reshape(-1, 1, 4)
        cell = cell_anchors(octave_sizes(base, scales_per_octave), aspect_ratios)
        anchors.append((centres + cell).reshape(-1, 4))
    return anchors
