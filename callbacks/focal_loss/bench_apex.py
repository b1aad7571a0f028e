"""Apex's focal loss, to be timed beside ours, and the trial that shows whether it can be believed on a machine.

Apex: https://github.com/NVIDIA/apex, apex/contrib/focal_loss, built with `--focal_loss`. It takes one tensor of logits
and one normalizer for all images, where the recipe's loss is normalized image by image: the same kernels, and the
same traffic.
"""

import torch
from torch import Tensor

from fasttrain.callbacks.focal_loss.reference import reference
from fasttrain.peers import assert_right
from fasttrain.proving import Trial

TRIAL = Trial("Apex's focal_loss", "apex", f"{__name__}:trial")
ALPHA, GAMMA = 0.25, 2.0


def focal_loss(logits: Tensor, targets: Tensor, foreground: Tensor) -> Tensor:
    """Return the sum of the loss over `foreground` (a float32 tensor of one element).

    Args:
        logits: (B, A, K), contiguous.
        targets: (B, A), class index, -1 background, -2 ignored.
        foreground: what to divide by.
    """
    from apex.contrib.focal_loss.focal_loss import focal_loss as of_apex  # type: ignore[import-not-found]

    loss: Tensor = of_apex(logits, targets, foreground, logits.shape[-1], ALPHA, GAMMA, 0.0)
    return loss


def trial() -> None:
    """Compare the loss and its gradient with the float64 reference.

    Raises:
        AssertionError: a number is off.
    """
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    targets = torch.randint(-2, 8, (1, 512), device=device)
    foreground = (targets >= 0).sum().float().reshape(1)
    for dtype in (torch.float32, torch.float16):
        logits = torch.randn(1, 512, 8, device=device).to(dtype).requires_grad_()
        exact = logits.detach().double().requires_grad_()
        wanted = reference([exact], targets, ALPHA, GAMMA)
        (wanted_gradient,) = torch.autograd.grad(wanted, exact)

        def compute(logits: Tensor = logits) -> tuple[Tensor, ...]:
            loss = focal_loss(logits, targets, foreground)
            return loss.detach().reshape(()), *torch.autograd.grad(loss, logits)

        assert_right(compute, {"the loss": wanted.detach(), "the gradient": wanted_gradient}, 1e-2, in_graph=False)
