"""The obvious version: one-hot targets and a sum over all logits, in whatever precision the logits have.

Lin et al., "Focal Loss for Dense Object Detection" (arXiv 1708.02002), equations 4 and 5:
FL = -alpha_t (1 - p_t)^gamma log(p_t), with p_t = p and alpha_t = alpha where the class is the anchor's, and 1 - p
and 1 - alpha elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Int

# Against this reference in float64 of the same rounded logits, relative to the largest value of the reference.
TOLERANCE = {
    torch.float64: 1e-12,  # some hundred roundings of 1e-16
    torch.float32: 2e-5,  # the kernel's approximate log2 near 1 is off by 2.4e-7, and a term that follows is 0.06
    torch.float16: 1e-3,  # each gradient is rounded once, by 5e-4; what is below 6e-8 is lost
    torch.bfloat16: 8e-3,  # each gradient is rounded once, by 4e-3
}
"""Of gradients."""
LOSS_TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-5, torch.bfloat16: 2e-5}
"""Of the loss, whose sum is float32 for every dtype of the logits: of its value, plus what the foreground anchors' own
classes would cost as background, which the kernel adds and takes back."""


def reference(levels: Sequence[Tensor], targets: Int[Tensor, "B A"], alpha: float = 0.25, gamma: float = 2.0) -> Tensor:
    """Return the loss: per image over the number of foreground anchors (at least 1), mean over images.

    Args:
        levels: logits (B, A of this level, K) each; in the order of the targets.
        targets: class index of each anchor, -1 for background, -2 for anchors that take part in no loss.
        alpha: weight of an anchor's own class; all others weigh 1 - alpha.
        gamma: focusing exponent.
    """
    logits = torch.cat(list(levels), dim=1)
    one_hot = F.one_hot(targets.long().clamp(min=0), logits.shape[2]).to(logits.dtype) * (targets >= 0).unsqueeze(2)
    p_t = torch.where(one_hot > 0, logits, -logits).sigmoid()
    alpha_t = alpha * one_hot + (1 - alpha) * (1 - one_hot)
    cross_entropy = F.binary_cross_entropy_with_logits(logits, one_hot, reduction="none")
    loss = alpha_t * (1 - p_t) ** gamma * cross_entropy
    of_anchor = torch.where(targets >= -1, loss.sum(dim=2), 0)
    return (of_anchor.sum(dim=1) / (targets >= 0).sum(dim=1).clamp(min=1)).mean()
