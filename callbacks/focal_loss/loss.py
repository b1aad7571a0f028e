"""The body: sigmoid focal loss over the levels of a feature pyramid, as a function and as a module. For any loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fasttrain.callbacks.focal_loss.compiled import focal_loss
from fasttrain.callbacks.focal_loss.eager import OnePass
from fasttrain.callbacks.focal_loss.tiers import Tier, tier_for
from fasttrain.errors import OptimizationError

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def sigmoid_focal_loss(
    levels: Sequence[Tensor],
    targets: Int[Tensor, "B A"],
    alpha: float = 0.25,
    gamma: float = 2.0,
    *,
    num_classes: int | None = None,
    expected: Float[Tensor, ""] | None = None,
    in_place: bool = False,
    tier: Tier = "auto",
) -> Float[Tensor, ""]:
    """Return the loss: per image over the number of foreground anchors (at least 1), mean over images.

    The levels are not concatenated and the targets not made one-hot: each logit is read once, and its gradient written
    then. Computed in float32 (float64 for float64 logits). A target that is no class makes the loss NaN.

    Args:
        levels: logits of each level, in the order of the targets: (B, A of this level, K), or a head's output
            (B, anchors per cell * K, H, W), which costs nothing if its memory is channels_last and a copy if not.
        targets: class index of each anchor, -1 for background, -2 for anchors that take part in no loss.
        alpha: weight of an anchor's own class; all others weigh 1 - alpha.
        gamma: focusing exponent; 2 is fastest.
        num_classes: K, needed for levels of four dimensions.
        expected: float32 scalar on the logits' device: the gradient of the loss that the backward will probably bring,
            1 if None. Every backward writes the one it got there, so the same tensor at each step follows a loss scale.
            A wrong one costs time only: the gradients are computed again.
        in_place: write the gradients over the logits. Nobody else may use those then, the backward can run once, and at
            a wrong `expected` the rounded gradients are multiplied. Not under torch.compile, which ignores it.
        tier: who computes; "auto" is the Triton kernel on an NVIDIA GPU, PyTorch elsewhere.

    Raises:
        OptimizationError: shapes or dtypes don't fit; or a gradient of the gradient was asked for, or a second backward
            after `in_place`.
    """
    rows = [_rows(level, num_classes) for level in levels]
    _check(rows, targets)
    if targets.dtype != torch.int32:
        targets = targets.long()
    targets = targets if targets.stride(1) == 1 else targets.contiguous()
    foreground = (targets >= 0).sum(dim=1, dtype=torch.int32)
    if expected is None:
        expected = torch.ones((), device=targets.device)
    wants_gradient = torch.is_grad_enabled() and any(level.requires_grad for level in rows)
    loss: Tensor
    if torch.compiler.is_compiling():
        loss = focal_loss(rows, targets, foreground, expected, alpha, gamma, tier, wants_gradient)[0]
    elif wants_gradient:
        rows = [level.contiguous() for level in rows] if in_place else rows
        loss = OnePass.apply(targets, foreground, expected, alpha, gamma, tier, in_place, *rows)
    else:
        loss, _ = tier_for(tier, rows[0]).forward(rows, targets, foreground, expected, alpha, gamma, None)
    return loss


class FocalLoss(nn.Module):
    """`sigmoid_focal_loss` that expects the gradient which the last backward brought. It has no state to save.

    Args:
        alpha, gamma, in_place, tier: as of `sigmoid_focal_loss`.
    """

    def __init__(self, alpha: float = 0.25, gamma: float = 2.0, *, in_place: bool = False, tier: Tier = "auto") -> None:
        super().__init__()
        self.alpha, self.gamma, self.in_place, self.tier = alpha, gamma, in_place, tier
        # Not a buffer: in half precision, to which a module's buffers may be cast, a loss scale is infinite.
        self._expected = torch.ones(())

    def forward(
        self, levels: Sequence[Tensor], targets: Int[Tensor, "B A"], num_classes: int | None = None
    ) -> Float[Tensor, ""]:
        """Return the loss; arguments as of `sigmoid_focal_loss`."""
        if self._expected.device != targets.device:
            self._expected = torch.ones((), device=targets.device)
        return sigmoid_focal_loss(
            levels, targets, self.alpha, self.gamma, num_classes=num_classes, expected=self._expected,
            in_place=self.in_place, tier=self.tier,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Return the options, for `print(model)`."""
        return f"alpha={self.alpha}, gamma={self.gamma}, in_place={self.in_place}, tier={self.tier!r}"


def _rows(level: Tensor, num_classes: int | None) -> Tensor:
    """Return logits as (B, A, K) whose rows are contiguous and follow one another."""
    if level.dim() == 4:
        if num_classes is None or level.shape[1] % num_classes:
            raise OptimizationError(
                f"focal_loss: logits of shape {tuple(level.shape)} have {level.shape[1]} channels, a multiple of the "
                f"number of classes, which was given as num_classes={num_classes}."
            )
        level = level.permute(0, 2, 3, 1).reshape(level.shape[0], -1, num_classes)
    if level.dim() == 3 and (level.stride(2) != 1 or level.stride(1) != level.shape[2]):
        level = level.contiguous()
    return level


def _check(levels: Sequence[Tensor], targets: Tensor) -> None:
    shapes = ", ".join(str(tuple(level.shape)) for level in levels)
    if targets.dim() != 2 or targets.is_floating_point() or targets.dtype == torch.bool:
        raise OptimizationError(
            f"focal_loss: targets are integers of shape (images, anchors): class indices, -1, or -2; these are "
            f"{targets.dtype} of shape {tuple(targets.shape)}."
        )
    if not levels or any(level.dim() != 3 or level.shape[0] != len(targets) for level in levels) or not len(targets):
        raise OptimizationError(
            f"focal_loss: levels are logits of shape (images, anchors, classes), at least one, for the images of "
            f"the targets {tuple(targets.shape)}; these are {shapes or 'none'}."
        )
    first = levels[0]
    if any(level.shape[2] != first.shape[2] or level.dtype != first.dtype for level in levels) or not first.shape[2]:
        kinds = ", ".join(f"{level.shape[2]} of {level.dtype}" for level in levels)
        raise OptimizationError(
            f"focal_loss: all levels have the same number of classes and dtype; these have {kinds}."
        )
    if not first.is_floating_point():
        raise OptimizationError(f"focal_loss: logits are floating point; these are {first.dtype}.")
    anchors = sum(level.shape[1] for level in levels)
    if anchors != targets.shape[1]:
        raise OptimizationError(
            f"focal_loss: there are targets for {targets.shape[1]} anchors and logits for {anchors} ({shapes})."
        )
    if any(level.device != targets.device for level in levels):
        raise OptimizationError(
            f"focal_loss: targets are on {targets.device} and logits on {', '.join(str(x.device) for x in levels)}."
        )
