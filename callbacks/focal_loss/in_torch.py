"""The tier for everything else: the same pass in plain PyTorch, in chunks that stay in a CPU's cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# 1 MiB each of about six float32 temporaries; 2**16 and 2**20 were slower on an AMD EPYC.
LOGITS_AT_ONCE = 2**18


def forward(
    levels: Sequence[Tensor],
    targets: Tensor,
    foreground: Tensor,
    expected: Tensor,
    alpha: float,
    gamma: float,
    gradients: Sequence[Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Return the loss, in float32 or float64, and the factor in the gradients, which are written into `gradients`."""
    return _pass(levels, targets, foreground, expected, alpha, gamma, gradients), expected.clone()


def backward(
    levels: Sequence[Tensor],
    targets: Tensor,
    foreground: Tensor,
    factor: Tensor,
    used: Tensor,
    alpha: float,
    gamma: float,
    gradients: Sequence[Tensor],
    expected: Tensor,
) -> None:
    """Compute the gradients again unless `used` is `factor`; let `expected` be the factor."""
    # On another device, to look would be to wait for it.
    if factor.device.type != "cpu" or used != factor:
        _pass(levels, targets, foreground, factor, alpha, gamma, gradients)
    expected.copy_(factor)


def rescale(gradients: Sequence[Tensor], factor: Tensor, used: Tensor, expected: Tensor) -> None:
    """Multiply gradients by factor / used, in place; let `expected` be the factor."""
    if factor.device.type != "cpu" or used != factor:
        ratio = factor / used
        for gradient in gradients:
            gradient.copy_(gradient.to(ratio.dtype) * ratio)
    expected.copy_(factor)


def accumulation_dtype(logits: Tensor) -> torch.dtype:
    """Return the dtype that the loss of such logits is computed in."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _pass(
    levels: Sequence[Tensor],
    targets: Tensor,
    foreground: Tensor,
    factor: Tensor,
    alpha: float,
    gamma: float,
    gradients: Sequence[Tensor] | None,
) -> Tensor:
    dtype = accumulation_dtype(levels[0])
    total = torch.zeros((), dtype=dtype, device=targets.device)
    weights = 1 / (foreground.clamp(min=1) * len(targets)).to(dtype)
    first_anchor = 0
    for i, level in enumerate(levels):
        of_level = targets[:, first_anchor : first_anchor + level.shape[1]]
        first_anchor += level.shape[1]
        for chunk in _chunks(level):
            x, target, weight = level[chunk].to(dtype), of_level[chunk], weights[chunk[0]].unsqueeze(1)
            wanted = target >= -1
            target = target.unsqueeze(2).long()
            index, is_class = target.clamp(0, x.shape[2] - 1), (target >= 0) & (target < x.shape[2])
            own = x.gather(2, index)
            loss, slope = _background(x, gamma)
            own_loss, own_slope = _background(-own, gamma)
            # A class that is none of the K must not pass for background.
            own_loss = torch.where(
                is_class, alpha * own_loss, torch.where(target >= 0, torch.nan, (1 - alpha) * loss.gather(2, index))
            )
            of_anchor = loss.mul_(1 - alpha).scatter_(2, index, own_loss).sum(dim=2)
            total += torch.where(wanted, of_anchor * weight, 0).sum()
            if gradients is not None:
                own_slope = torch.where(is_class, -alpha * own_slope, (1 - alpha) * slope.gather(2, index))
                slope.mul_(1 - alpha).scatter_(2, index, own_slope).mul_((weight * factor).unsqueeze(2))
                gradients[i][chunk].copy_(slope.masked_fill_(~wanted.unsqueeze(2), 0))
    return total


def _chunks(level: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield slices of images and anchors."""
    batch, anchors, classes = level.shape
    images = max(1, LOGITS_AT_ONCE // (anchors * classes))
    rows = max(1, LOGITS_AT_ONCE // classes) if images == 1 else anchors
    for image in range(0, batch, images):
        for row in range(0, anchors, rows):
            yield slice(image, image + images), slice(row, row + rows)


def _background(x: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Return L(x) = sigmoid(x)^gamma softplus(x), and its derivative."""
    p, softplus = torch.sigmoid(x), F.softplus(x)
    power = p * p if gamma == 2 else p**gamma
    return power * softplus, (gamma * (1 - p) * softplus + p) * power
