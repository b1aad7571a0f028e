"""The tier for everything else: PyTorch's own operators, which autograd differentiates by itself.

It is what nn.BatchNorm2d does, statistics, errors and evaluation mode included. torch.compile makes kernels of it.
"""

from torch import Tensor, nn


def normalized(x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    """Return norm(x), whatever else the forward of a subclass does. Updates its running statistics in training."""
    return nn.BatchNorm2d.forward(norm, x)


def batch_norm_relu(x: Tensor, norm: nn.BatchNorm2d, z: Tensor | None, z_norm: nn.BatchNorm2d | None) -> Tensor:
    """Return relu(norm(x) [+ z | + z_norm(z)])."""
    value = normalized(x, norm)
    if z is not None:
        value = value + (z if z_norm is None else normalized(z, z_norm))
    return value.relu()
