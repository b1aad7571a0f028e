"""Candidates like a detector's: crowded boxes of falling scores in five levels, to measure with."""

import torch
from torch import Tensor

LEVELS, CANDIDATES = 5, 1000
"""MLPerf Training v2.0, RetinaNet: the 1000 best of each of five levels."""
CLASSES = 264
SIDE = 800.0

Candidates = tuple[Tensor, Tensor, Tensor, Tensor]


def random_candidates(
    device: torch.device, images: int, candidates: int = LEVELS * CANDIDATES, objects: int = 12, classes: int = CLASSES
) -> Candidates:
    """Return boxes, scores, labels and which are candidates, the same at every call.

    Boxes crowd around an image's objects, most of them in the object's class, as a trained detector's do.

    Args:
        device: of the result.
        images: B.
        candidates: N.
        objects: of an image.
        classes: labels are below.
    """
    generator = torch.Generator().manual_seed(0)
    size = 16 * 25 ** torch.rand(images, objects, 2, generator=generator)
    corner = torch.rand(images, objects, 2, generator=generator) * (SIDE - size).clamp(min=1)
    label = torch.randint(classes, (images, objects), generator=generator)
    around = torch.randint(objects, (images, candidates), generator=generator)
    spread = torch.randn(images, candidates, 4, generator=generator) * 0.15
    own = around.unsqueeze(2).expand(-1, -1, 2)
    size, corner = size.gather(1, own), corner.gather(1, own)
    corner = corner + spread[..., :2] * size
    boxes = torch.cat([corner, corner + size * spread[..., 2:].exp()], dim=2).clamp(0, SIDE)
    strays = torch.rand(images, candidates, generator=generator) < 0.3
    labels = label.gather(1, around).where(~strays, torch.randint(classes, around.shape, generator=generator))
    scores = torch.rand(images, candidates, generator=generator) ** 3
    return boxes.to(device), scores.to(device), labels.to(device), (scores > 0.05).to(device)
