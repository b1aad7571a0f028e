"""What takes the place of torchvision's and PyTorch's modules: the same submodules, parameters and names."""

from typing import Any, TypeVar

from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from fasttrain.callbacks.bn_relu.fused import (
    batch_norm_add_relu,
    batch_norm_dual_relu,
    batch_norm_relu,
    batch_norm_relu_pool,
    twin,
)
from fasttrain.surgery import why_not_passed_by, with_state_of

M = TypeVar("M", bound=nn.Module)


class FusedBatchNormReLU(nn.BatchNorm2d):
    """nn.BatchNorm2d and the ReLU behind it; made by `fused_norm`."""

    def forward(self, input: Tensor) -> Tensor:
        """Return relu(norm(input)) in its dtype."""
        return batch_norm_relu(input, self)


class FusedBatchNormReLUPool(nn.BatchNorm2d):
    """nn.BatchNorm2d, and the ReLU and the max-pooling behind it; made by `fused_stem`."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the pooled map, which holds a twin for the first block's shortcut."""
        return batch_norm_relu_pool(input, self, twice=not self._forward_hooks)


class _FusedBlock:
    """Both kinds of block: what they have in common is how they end."""

    downsample: nn.Module | None
    _forward_hooks: Any

    def _end(self, out: Tensor, norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
        z = twin(x)
        twice = not self._forward_hooks  # a hook may keep the output, and ask for all of its gradient
        if self.downsample is None:
            return batch_norm_add_relu(out, norm, z, twice=twice)
        if not _ends_in_a_trained_norm(self.downsample):
            return batch_norm_add_relu(out, norm, self.downsample(z), twice=twice)
        assert isinstance(self.downsample, nn.Sequential)
        modules: list[Any] = list(self.downsample)
        for module in modules[:-1]:
            z = module(z)
        return batch_norm_dual_relu(out, norm, z, modules[-1], twice=twice)


class TrainedBottleneck(_FusedBlock, Bottleneck):  # type: ignore[misc]
    """torchvision's Bottleneck with fused normalizations; made by `fused_block`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, which holds a twin for the next block's shortcut."""
        out = batch_norm_relu(self.conv1(x), self.bn1)
        out = batch_norm_relu(self.conv2(out), self.bn2)
        return self._end(self.conv3(out), self.bn3, x)


class TrainedBasicBlock(_FusedBlock, BasicBlock):  # type: ignore[misc]
    """torchvision's BasicBlock with fused normalizations; made by `fused_block`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, which holds a twin for the next block's shortcut."""
        out = batch_norm_relu(self.conv1(x), self.bn1)
        return self._end(self.conv2(out), self.bn2, x)


FUSED_BLOCKS: dict[type[nn.Module], type[nn.Module]] = {Bottleneck: TrainedBottleneck, BasicBlock: TrainedBasicBlock}


def fused_block(block: nn.Module) -> nn.Module:
    """Return the fused form of a Bottleneck or BasicBlock, around the same submodules."""
    return with_state_of(block, FUSED_BLOCKS[type(block)])


def fused_norm(norm: nn.Module) -> nn.Module:
    """Return a BatchNorm2d with a ReLU behind it, around the same parameters and statistics."""
    return with_state_of(norm, FusedBatchNormReLU)


def fused_stem(norm: nn.Module) -> nn.Module:
    """Return a BatchNorm2d with ReLU and pooling behind it, around the same parameters and statistics."""
    return with_state_of(norm, FusedBatchNormReLUPool)


def is_plain_norm(module: nn.Module) -> bool:
    """Whether a module is a BatchNorm2d with PyTorch's own forward and no hooks."""
    return (
        isinstance(module, nn.BatchNorm2d)
        and type(module).forward is nn.BatchNorm2d.forward
        and why_not_passed_by(module) is None
    )


def _ends_in_a_trained_norm(downsample: nn.Module) -> bool:
    if type(downsample) is not nn.Sequential or why_not_passed_by(downsample) is not None or not len(downsample):
        return False
    last = downsample[-1]
    return is_plain_norm(last) and last.training
